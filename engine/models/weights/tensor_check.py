"""Checks that a source has exactly the tensors that a decoder needs."""

import re
from collections.abc import Collection, Sequence

import numpy as np

from engine.errors import ConfigurationError
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import Parameter
from engine.models.weights.pieces import pieces
from engine.models.weights.published.quantised_tensor import read_whole
from engine.models.weights.sources.tensor_source import FLOATS, HEAD, TensorSource

HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from config.json."""
EMBEDDING = "model.embed_tokens.weight"
COMPARED_ROWS = 4096


def check_tensors(
    source: TensorSource, wanted: Sequence[tuple[Parameter, int | None]], model: ModelSpec, *, whole: bool
) -> None:
    """Raises ConfigurationError unless a source has exactly the tensors of ``wanted``.

    If not ``whole``, it need not have all of them.
    """
    shapes = {piece.tensor: piece.stored for parameter, layer in wanted for piece in pieces(parameter, layer)}
    missing = [name for name in shapes if name not in source.names] if whole else []
    _refuse(source, missing, "not in the checkpoint, though config.json calls for it")
    for name, shape in shapes.items():
        if name not in source.names:
            continue
        found = source.info(name)
        if found.shape != shape:
            raise ConfigurationError(
                f"{source.origin}: {name} has shape {list(found.shape)}, but config.json calls for {list(shape)}"
            )
        if found.stored_as not in FLOATS:
            raise ConfigurationError(
                f"{source.origin}: {name} is stored as {found.stored_as}; supported are {', '.join(FLOATS)}, and what "
                "quantization_config in config.json describes"
            )
    unknown = set(source.names) - set(shapes)
    embedding = next((one.rule.tensors[0] for one, _ in wanted if one.name == "embedding"), EMBEDDING)
    if model.tied_embeddings and HEAD in unknown and embedding in source.names:
        unknown.remove(HEAD)
        _check_tied(source, embedding, model.vocab_size)
    unused = re.compile(model.unused_tensors or "a^")
    unknown = {name for name in unknown if not HARMLESS.fullmatch(name) and not unused.fullmatch(name)}
    unknown -= {name for name in unknown if _adds_nothing(source, name, shapes)}
    _refuse(source, sorted(unknown), "in the checkpoint, but a decoder as config.json describes it has no use for it")


def _check_tied(source: TensorSource, embedding: str, rows: int) -> None:
    """Raises ConfigurationError if a stored head differs from the embedding it is tied to."""
    same = source.info(HEAD).shape == source.info(embedding).shape
    for start in range(0, rows if same else 0, COMPARED_ROWS):
        block = (slice(start, min(start + COMPARED_ROWS, rows)), slice(None))
        same = same and np.array_equal(source.read(embedding, block), source.read(HEAD, block))
    if not same:
        raise ConfigurationError(
            f"{source.origin}: config.json ties the embeddings, but {HEAD} differs from {embedding}: "
            "set tie_word_embeddings to false to serve both"
        )


def _adds_nothing(source: TensorSource, name: str, wanted: Collection[str]) -> bool:
    """Whether it is a bias of zeros, which AutoGPTQ has written beside kernels without any."""
    kernel = name.removesuffix(".bias")
    return f"{kernel}.weight" in wanted and kernel != name and not read_whole(source, name).any()


def _refuse(source: TensorSource, names: list[str], fault: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more such)" if len(names) > 1 else ""
        raise ConfigurationError(f"{source.origin}: {names[0]}{more} is {fault}")
