"""Checks that a source has exactly the tensors that a decoder needs."""

import re
from collections.abc import Sequence

import numpy as np

from engine.errors import ConfigurationError
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import Parameter
from engine.models.weights.pieces import pieces
from engine.models.weights.sources import TensorSource

HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from config.json."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096


def verify(source: TensorSource, wanted: Sequence[tuple[Parameter, int | None]], model: ModelSpec) -> None:
    """Raises ConfigurationError unless a source has exactly the tensors of ``wanted``."""
    shapes = {piece.tensor: piece.stored for parameter, layer in wanted for piece in pieces(parameter, layer)}
    missing = [name for name in shapes if name not in source.names]
    _refuse(source, missing, "not in the checkpoint, though config.json calls for it")
    for name, shape in shapes.items():
        found = source.info(name).shape
        if found != shape:
            raise ConfigurationError(
                f"{source.origin}: {name} has shape {list(found)}, but config.json calls for {list(shape)}"
            )
    unknown = set(source.names) - set(shapes)
    if model.tied_embeddings and HEAD in unknown:
        unknown.remove(HEAD)
        _verify_tied(source, model.vocab_size)
    unknown = {name for name in unknown if not HARMLESS.fullmatch(name)}
    _refuse(source, sorted(unknown), "in the checkpoint, but a decoder as config.json describes it has no use for it")


def _verify_tied(source: TensorSource, rows: int) -> None:
    """Raises ConfigurationError if a stored head differs from the embedding it is tied to."""
    same = source.info(HEAD).shape == source.info(EMBEDDING).shape
    for start in range(0, rows if same else 0, COMPARED_ROWS):
        block = (slice(start, min(start + COMPARED_ROWS, rows)), slice(None))
        same = same and np.array_equal(source.read(EMBEDDING, block), source.read(HEAD, block))
    if not same:
        raise ConfigurationError(
            f"{source.origin}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}: "
            "set tie_word_embeddings to false to serve both"
        )


def _refuse(source: TensorSource, names: list[str], fault: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more such)" if len(names) > 1 else ""
        raise ConfigurationError(f"{source.origin}: {names[0]}{more} is {fault}")
