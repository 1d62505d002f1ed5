"""Loads a decoder: the tensors of a Hugging Face directory, streamed into the parameters on their devices."""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from engine.errors import ConfigurationError
from engine.mesh import DeviceMesh
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.linear import Scale
from engine.models.parameters import TENSORS, Layout, Parameter
from engine.models.placement import Arrange, Placement, as_it_is, placed_spec, source_names
from engine.models.sharding import part_of

Progress = Callable[[int, int], None]
"""Hears, after each parameter, the bytes placed so far and in all."""

HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that old checkpoints hold though they follow from config.json."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096


def load_decoder(
    directory: Path,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    mesh: DeviceMesh,
    arrange: Arrange = as_it_is,
    progress: Progress,
) -> Decoder:
    """The decoder of a Hugging Face directory, its parameters in ``dtype`` but for norm scales, which stay float32.

    Each parameter of a layer is read straight into the devices' parts of it, as ``arrange`` makes a decoder, so that the
    host never holds more than one. Raises ConfigurationError naming the tensor or file that is missing, misshapen,
    corrupt or unknown, before any weight is read.
    """
    graph, abstract = nnx.split(_abstract(config, arrange))
    parameters = _parameters(config, dtype)
    done, total = 0, sum(parameter.nbytes for parameter in parameters.values())
    loaded = []

    def hear(parameter: Parameter) -> None:
        nonlocal done
        done += parameter.nbytes
        progress(done, total)

    with open_checkpoint(directory) as checkpoint:
        _verify(checkpoint, parameters.values(), config)
        placement = Placement(checkpoint, mesh, hear)
        flat = dict(nnx.to_flat_state(abstract))
        for path, variable in flat.items():
            sources = [parameters[name] for name in source_names(path, config)]
            scale_path = (*path[:-1], f"{path[-1]}_scale")
            if isinstance(variable, Scale):
                continue
            if scale_path in flat:
                scale = flat[scale_path]
                numbers, scales = placement.load_quantized(variable, scale, sources)
                loaded += [(path, variable.replace(numbers)), (scale_path, scale.replace(scales))]
            else:
                loaded.append((path, variable.replace(placement.load(variable, sources))))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def abstract_decoder(
    config: ModelConfig, dtype: DTypeLike, *, mesh: DeviceMesh, arrange: Arrange = as_it_is
) -> Decoder:
    """The decoder that ``load_decoder`` gives, of shapes alone; reads nothing."""
    graph, abstract = nnx.split(_abstract(config, arrange))
    parameters = _parameters(config, dtype)
    shapes = []
    for path, variable in nnx.to_flat_state(abstract):
        source = parameters[source_names(path, config)[0]]
        sharding = mesh.sharding(*placed_spec(variable, source))
        own = variable.dtype if isinstance(variable, Scale) or variable.dtype == np.int8 else source.dtype
        shapes.append((path, variable.replace(jax.ShapeDtypeStruct(variable.shape, own, sharding=sharding))))
    return nnx.merge(graph, nnx.from_flat_state(shapes))


def parameter_bytes(config: ModelConfig, dtype: DTypeLike, *, quantized: bool = False) -> int:
    """What ``load_decoder`` will place on each device, kernels and tables as int8 if ``quantized``; reads nothing."""
    return sum(_bytes(parameter, config, quantized) for parameter in _parameters(config, dtype).values())


def _bytes(parameter: Parameter, config: ModelConfig, quantized: bool) -> int:
    part = part_of(parameter.name, parameter.shape, config.tensor_parallel_size)
    if not quantized or parameter.layout is Layout.VECTOR:
        return math.prod(part) * parameter.dtype.itemsize
    outputs = part[:1] if parameter.layout is Layout.TABLE else part[1:]
    return math.prod(part) + math.prod(outputs) * np.dtype(np.float32).itemsize


def _abstract(config: ModelConfig, arrange: Arrange) -> Decoder:
    def make() -> Decoder:
        decoder = Decoder(config, nnx.Rngs(0))
        arrange(decoder)
        return decoder

    return nnx.eval_shape(make)


def _parameters(config: ModelConfig, dtype: DTypeLike) -> dict[str, Parameter]:
    """Every parameter of every layer, by name."""
    padding = config.padded_vocab_size - config.vocab_size
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(_abstract(config, as_it_is))):
        name = ".".join(map(str, path))
        own = jnp.dtype(jnp.float32 if name.endswith(".scale") else dtype)
        replicas = config.kv_replicas if "qkv" in name else 1
        table = TENSORS.get(name, (None,))[0] is Layout.TABLE
        found[name] = Parameter(name, variable.shape, own, replicas, padding if table else 0)
    return found


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
