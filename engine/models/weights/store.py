"""The served arrays of a decoder: their shapes, their bytes, and how a source fills them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.partition import Partition
from engine.models.spec import layer_plan
from engine.models.weights.factory import declared
from engine.models.weights.forms import Scaled, dense_leaf, form_of, leaves_of
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.pieces import assemble, pieces
from engine.models.weights.published.dequantised import Dequantised
from engine.models.weights.sources import TensorSource
from engine.models.weights.text_part import TextPart
from engine.models.weights.verification import verify
from engine.models.weights.weight_format import Leaf, WeightFormat

Report = Callable[[int, int], None]
"""Called after each parameter of a layer with the bytes placed so far and in all."""


@dataclass(frozen=True)
class Served:
    """One entry of a decoder's state."""

    path: tuple[Any, ...]
    parameter: Parameter
    layers: tuple[int, ...] | None
    """The layers whose parameters it has; None if it belongs to no layer."""
    is_stacked: bool

    @property
    def sources(self) -> tuple[int | None, ...]:
        """The layers that its parts are read for, in order."""
        return (None,) if self.layers is None else self.layers

    def found_in(self, source: TensorSource) -> "Served":
        """With the rule for the tensors that a source has."""
        other = self.parameter.rule.otherwise
        if other is None or pieces(self.parameter, self.sources[0])[0].tensor in source.names:
            return self
        return replace(self, parameter=replace(self.parameter, rule=other))

    def leaves(self, form: WeightFormat, devices: int) -> Any:
        """The served form, with a Leaf for each array."""
        leaves = leaves_of(self.parameter, form, devices)
        return jax.tree.map(lambda leaf: leaf.stacked(len(self.sources)), leaves) if self.is_stacked else leaves


def abstract_decoder(partition: Partition, form: WeightFormat, *, mesh: DeviceMesh) -> Decoder:
    """The decoder that ``load_decoder`` returns, of shapes alone; reads nothing."""
    decoder = _declared_decoder(partition, form.scans)
    graph, state = nnx.split(decoder)
    shapes = []
    for path, variable in nnx.to_flat_state(state):
        leaves = _served(path, variable, partition).leaves(form, partition.devices)
        shapes.append((path, variable.replace(jax.tree.map(partial(_shape, mesh=mesh), leaves))))
    return nnx.merge(graph, nnx.from_flat_state(shapes))


def load_decoder(
    source: TensorSource, partition: Partition, form: WeightFormat, *, mesh: DeviceMesh, progress: Report
) -> Decoder:
    """A decoder with the weights of a source. Raises as ``put`` does."""
    decoder = abstract_decoder(partition, form, mesh=mesh)
    put(source, decoder, form, mesh=mesh, progress=progress)
    return decoder


def put(source: TensorSource, decoder: Decoder, form: WeightFormat, *, mesh: DeviceMesh, progress: Report) -> None:
    """Read, transform and put every tensor of a source into the served arrays of a decoder.

    The decoder has shapes alone, or weights of the same form, which are then donated. Each
    parameter of a layer is read directly into the devices' parts, so the host never has more than
    one. Raises ConfigurationError naming a missing, misshapen or unknown tensor before any read.
    """
    partition = decoder.partition
    if partition.model.unserved:
        source = TextPart(source, partition.model.unserved)
    if partition.model.published is not None:
        source = Dequantised(source, partition.model.published)
    state = nnx.state(decoder)
    state_entries = nnx.to_flat_state(state)
    entries = [(_served(path, variable, partition).found_in(source), variable) for path, variable in state_entries]
    wanted = [(entry.parameter, layer) for entry, _ in entries for layer in entry.sources]
    verify(source, wanted, partition.model)
    sizes = [_nbytes(parameter, form) for parameter, _ in wanted]
    placement = _Placement(source, form, mesh, _Progress(sum(sizes), progress))
    placed = []
    for entry, variable in entries:
        placed.append((entry.path, variable.replace(placement.fill(entry, variable.get_value()))))
    nnx.update(decoder, nnx.from_flat_state(placed))


def parameter_bytes(partition: Partition, form: WeightFormat) -> int:
    """Bytes that ``load_decoder`` will allocate on each device; reads nothing."""
    return sum(
        leaf.nbytes(partition.devices)
        for entry in declared_entries(partition)
        for leaf in jax.tree.leaves(entry.leaves(form, partition.devices))
    )


def kept_in_8_bits(partition: Partition, form: WeightFormat) -> set[Role]:
    """The uses of weights of which some have 8 bits in a format where kernels have 4."""
    state = nnx.to_flat_state(nnx.state(_declared_decoder(partition, scans=True)))
    parameters = [declared(variable) for _, variable in state]
    return {one.role for one in parameters if form_of(one, form, partition.devices) is Scaled}


def declared_entries(partition: Partition) -> list[Served]:
    """The entries of a model's decoder, repeated layers in one; reads nothing."""
    return entries(_declared_decoder(partition, scans=True))


def entries(decoder: Decoder) -> list[Served]:
    """The entries of a decoder's state, in order."""
    return [_served(path, variable, decoder.partition) for path, variable in nnx.to_flat_state(nnx.state(decoder))]


def _declared_decoder(partition: Partition, scans: bool) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(partition, nnx.Rngs(0), scans=scans))


def _served(path: tuple[Any, ...], variable: nnx.Variable[Any], partition: Partition) -> Served:
    """The entry at a path: ``layers.3.mlp...``, in a stack ``layers.0.blocks.1.mlp...``."""
    parameter = declared(variable)
    if path[0] != "layers":
        return Served(path, parameter, None, is_stacked=False)
    if path[2] != "blocks":
        return Served(path, parameter, (path[1],), is_stacked=False)
    plan = layer_plan(partition.model.blocks)
    start, group = sum(before.num_layers for before in plan[: path[1]]), plan[path[1]]
    layers = range(start + path[3], start + group.num_layers, len(group.period))
    return Served(path, parameter, tuple(layers), is_stacked=True)


def _nbytes(parameter: Parameter, form: WeightFormat) -> int:
    """Bytes of a parameter before it is quantised, on all devices together."""
    return dense_leaf(parameter, form).nbytes(devices=1)


def _shape(leaf: Leaf, mesh: DeviceMesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mesh.sharding(*leaf.split))


class _Progress:
    def __init__(self, total: int, report: Report) -> None:
        self._done, self._total, self._report = 0, total, report

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done, self._total)


class _Placement:
    """Reads parameters into the devices' parts."""

    def __init__(self, source: TensorSource, form: WeightFormat, mesh: DeviceMesh, progress: _Progress) -> None:
        self._source = source
        self._form = form
        self._mesh = mesh
        self._progress = progress

    def fill(self, entry: Served, served: Any) -> Any:
        """The new arrays of an entry; ``served`` are its former arrays or shapes."""
        if not entry.is_stacked:
            jax.tree.map(_delete, served)
            return self._made(entry.parameter, entry.sources[0])
        leaves = entry.leaves(self._form, self._mesh.size)
        stacks = jax.tree.map(self._room, served, leaves)
        for place, layer in enumerate(entry.sources):
            made = self._made(entry.parameter, layer)
            stacks = jax.tree.map(partial(_fill, place=np.int32(place)), stacks, made)
        return stacks

    def _room(self, served: Any, leaf: Leaf) -> Array:
        """The served stack, or zeros if there is none yet."""
        if isinstance(served, Array):
            return served
        room: Array = self._mesh.maker(partial(jnp.zeros, leaf.shape, leaf.dtype), *leaf.split)()
        return room

    def _made(self, parameter: Parameter, layer: int | None) -> Any:
        values = self._place(parameter, layer)
        kind = form_of(parameter, self._form, self._mesh.size)
        made = values if kind is None else kind.made_of(values, parameter, self._form, self._mesh)
        self._progress.add(_nbytes(parameter, self._form))
        return made

    def _place(self, parameter: Parameter, layer: int | None) -> Array:
        """Each device's part, read for it alone, in its form's layout; not quantised or packed."""
        leaf = dense_leaf(parameter, self._form)
        padding = leaf.shape[-1] - parameter.sizes[-1] if parameter.role is Role.TABLE else 0
        declared_sharding = self._mesh.sharding(*parameter.split)
        parts = []
        for device, index in declared_sharding.addressable_devices_indices_map(parameter.sizes).items():
            assert index is not None
            part = assemble(self._source, parameter, layer, index, leaf.dtype, padding)
            sizes, axes = parameter.as_served(part.shape), len(leaf.shape)
            parts.append(
                jax.device_put(part.reshape(sizes if len(sizes) == axes else (*sizes[: axes - 1], -1)), device)
            )
        array = jax.make_array_from_single_device_arrays(leaf.shape, self._mesh.sharding(*leaf.split), parts)
        jax.block_until_ready(array)  # pending transfers would hold their parameters on the host
        return array


def _delete(served: Any) -> None:
    if isinstance(served, Array):
        served.delete()


@partial(jax.jit, donate_argnums=0)
def _fill(stack: Array, layer: Array, place: Array) -> Array:
    filled: Array = jax.lax.dynamic_update_index_in_dim(stack, layer, place, 0)
    return filled
