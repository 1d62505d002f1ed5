"""Loads a decoder: the tensors of a Hugging Face directory, streamed into the parameters on their devices."""

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from engine.errors import ConfigurationError
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.parameters import Parameter, assemble

Place = Callable[[str, tuple[int, ...]], Sharding]
"""The sharding of a parameter, from its name (``layers.0.mlp.down_kernel``) and shape; never along a fused axis."""
Progress = Callable[[int, int], None]
"""Hears, after each parameter, the bytes placed so far and in all."""

HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that old checkpoints hold though they follow from config.json."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096


def load_decoder(
    directory: Path, config: ModelConfig, dtype: DTypeLike, *, place: Place | None = None, progress: Progress
) -> Decoder:
    """The decoder of a Hugging Face directory, its parameters in ``dtype`` but for norm scales, which stay float32.

    Each parameter is read straight into the shards that ``place`` calls for (None: all on the first device), so
    that the host never holds more than one. Raises ConfigurationError naming the tensor or file that is missing,
    misshapen, corrupt or unknown, before any weight is read.
    """
    graph, abstract = nnx.split(_abstract(config))
    flat = nnx.to_flat_state(abstract)
    parameters = [_parameter(path, variable, dtype) for path, variable in flat]
    done, total = 0, sum(parameter.nbytes for parameter in parameters)
    loaded = []
    with open_checkpoint(directory) as checkpoint:
        _verify(checkpoint, parameters, config)
        for parameter, (path, variable) in zip(parameters, flat, strict=True):
            sharding = (place or _first_device)(parameter.name, parameter.shape)
            read = functools.partial(assemble, checkpoint, parameter)
            array = jax.make_array_from_callback(parameter.shape, sharding, read)
            jax.block_until_ready(array)  # or transfers under way would keep their parameters on the host
            loaded.append((path, variable.replace(array)))
            done += parameter.nbytes
            progress(done, total)
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def abstract_decoder(config: ModelConfig, dtype: DTypeLike, prepare: Callable[[Decoder], None]) -> Decoder:
    """The decoder that ``load_decoder`` gives and ``prepare`` then changes, of shapes alone; reads nothing."""
    graph, abstract = nnx.split(_abstract(config, prepare))
    shapes = [
        (path, variable.replace(jax.ShapeDtypeStruct(variable.shape, _parameter(path, variable, dtype).dtype)))
        for path, variable in nnx.to_flat_state(abstract)
    ]
    return nnx.merge(graph, nnx.from_flat_state(shapes))


def parameter_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """What ``load_decoder`` will place, on all devices together; reads nothing."""
    flat = nnx.to_flat_state(nnx.state(_abstract(config)))
    return sum(_parameter(path, variable, dtype).nbytes for path, variable in flat)


def _abstract(config: ModelConfig, prepare: Callable[[Decoder], None] | None = None) -> Decoder:
    def make() -> Decoder:
        decoder = Decoder(config, nnx.Rngs(0))
        if prepare is not None:
            prepare(decoder)
        return decoder

    return nnx.eval_shape(make)


def _parameter(path: tuple[Any, ...], variable: Any, dtype: DTypeLike) -> Parameter:
    name = ".".join(map(str, path))
    return Parameter(name, variable.shape, jnp.dtype(jnp.float32 if name.endswith(".scale") else dtype))


def _first_device(name: str, shape: tuple[int, ...]) -> Sharding:
    del name, shape
    return SingleDeviceSharding(jax.devices()[0])


def _verify(checkpoint: Checkpoint, parameters: Iterable[Parameter], config: ModelConfig) -> None:
    """Raises ConfigurationError unless the checkpoint holds what the parameters are made of and nothing else."""
    pieces = [piece for parameter in parameters for piece in parameter.pieces]
    missing = [piece.tensor for piece in pieces if piece.tensor not in checkpoint.files]
    _refuse(checkpoint, missing, "not in the checkpoint, though config.json calls for it")
    for piece in pieces:
        found = checkpoint.shape(piece.tensor)
        if found != piece.stored:
            raise ConfigurationError(
                f"{checkpoint.directory}: {piece.tensor} has shape {list(found)}, "
                f"but config.json calls for {list(piece.stored)}"
            )
    unknown = set(checkpoint.files) - {piece.tensor for piece in pieces}
    if config.tied_embeddings and HEAD in unknown:
        unknown.remove(HEAD)
        _verify_tied(checkpoint, config.vocab_size)
    unknown = {name for name in unknown if not HARMLESS.fullmatch(name)}
    _refuse(
        checkpoint, sorted(unknown), "in the checkpoint, but a decoder as config.json describes it has no use for it"
    )


def _verify_tied(checkpoint: Checkpoint, rows: int) -> None:
    """Raises ConfigurationError where a head is stored beside the embedding that it is said to be."""
    same = checkpoint.shape(HEAD) == checkpoint.shape(EMBEDDING)
    for start in range(0, rows if same else 0, COMPARED_ROWS):
        block = (slice(start, min(start + COMPARED_ROWS, rows)), slice(None))
        same = same and np.array_equal(checkpoint.read(EMBEDDING, block), checkpoint.read(HEAD, block))
    if not same:
        raise ConfigurationError(
            f"{checkpoint.directory}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}: "
            "set tie_word_embeddings to false to serve both"
        )


def _refuse(checkpoint: Checkpoint, names: list[str], fault: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more such)" if len(names) > 1 else ""
        raise ConfigurationError(f"{checkpoint.directory}: {names[0]}{more} is {fault}")
