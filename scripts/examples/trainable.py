"""The decoder that oDriver serves, as a function of a checkpoint's tensors that has gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.weights.factory import declared
from engine.models.weights.forms import Dense
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.pieces import Piece, pieces
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.weight_format import Layout
from scripts.demo.corpus import Batch

Tensors = Mapping[str, Array]
"""By their names in checkpoints, each in its stored shape."""


class Trainable:
    """A model directory for a trainer, in float32 and on one device.

    It can be any model that needs no more than plain causal attention, and whose tensors are
    stored as they are served but for their shapes. Raises ConfigurationError as
    ``read_model_config`` does.
    """

    def __init__(self, directory: Path) -> None:
        checkpoint, partition = open_checkpoint(directory), Partition(read_model_config(directory))
        assert partition.model.published is None
        self.tensors: dict[str, Array] = {
            name: jnp.asarray(checkpoint.read(name, (...,)), jnp.float32) for name in checkpoint.names
        }
        """The weights as they are published."""
        declaration = nnx.eval_shape(lambda: Decoder(partition))
        self._graph, self._state = nnx.split(declaration)

    def decoder(self, tensors: Tensors) -> Decoder:
        """The decoder with these weights, of which none may be missing."""
        filled = []
        for path, variable in nnx.to_flat_state(self._state):
            layer = path[1] if path[0] == "layers" else None
            filled.append((path, variable.replace(_served(declared(variable), layer, tensors))))
        return nnx.merge(self._graph, nnx.from_flat_state(filled))

    def log_probs(self, tensors: Tensors, batch: Batch) -> Array:
        """f32[rows, length]: the log-probability of each target of a batch, at temperature 1."""
        by_token = jax.nn.log_softmax(batch.logits(self.decoder(tensors)))
        return jnp.take_along_axis(by_token, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]


def _served(parameter: Parameter, layer: int | None, tensors: Tensors) -> Any:
    """A parameter as the decoder has it, from its tensors, by its declaration."""
    assert parameter.rule.transform is None and parameter.padding == 0
    numbers = jnp.zeros(parameter.sizes)
    for piece in pieces(parameter, layer):
        region = tuple(piece.region.get(name, slice(None)) for name in parameter.names)
        numbers = numbers.at[region].set(_part(piece, parameter.names, tensors))
    numbers = numbers.reshape(parameter.shape)
    return numbers if parameter.role is Role.VECTOR else Dense(numbers, Layout.AXES, parameter.out(1))


def _part(piece: Piece, names: tuple[str, ...], tensors: Tensors) -> Array:
    """The numbers of a piece, its axes in the order of ``names``, the parameter's."""
    cut = zip(piece.begins, piece.shape, strict=True)
    stored = tensors[piece.tensor][tuple(slice(begin, begin + size) for begin, size in cut)]
    joined = [name for group in piece.groups for name in group]
    apart = stored.reshape([piece.sizes[name] for name in joined])
    return apart.transpose([joined.index(name) for name in names if name in joined])
