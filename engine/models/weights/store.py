"""The served arrays of a decoder: their shapes, their bytes, and how a source fills them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from engine.devices.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.heads.draft_head import DraftHead, draft_head, tensors_of_head
from engine.models.partition import Partition
from engine.models.spec import layer_plan
from engine.models.weights.factory import declared
from engine.models.weights.forms import Scaled, dense_leaf, form_of, leaves_of
from engine.models.weights.int4 import group_size, has_groups
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.pieces import pieces
from engine.models.weights.placement import Parts, delete, device_parts, fill, made_of
from engine.models.weights.published.compressed_tensors import int8_inputs
from engine.models.weights.published.dequantised import Dequantised
from engine.models.weights.published.int8_inputs import Int8Inputs
from engine.models.weights.sources.base_model import with_prefix
from engine.models.weights.sources.tensor_source import TensorSource
from engine.models.weights.sources.text_part import TextPart
from engine.models.weights.tensor_check import check_tensors
from engine.models.weights.weight_format import Leaf, WeightFormat

AnyDecoder = Decoder | DraftHead
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

    @property
    def parts(self) -> list[tuple[Parameter, int | None]]:
        """Its parameter in each of ``sources``."""
        return [(self.parameter, layer) for layer in self.sources]

    def found_in(self, source: TensorSource) -> "Served":
        """With the rule for the tensors that a source has: in their shapes, or if none fits, by their names."""
        if self.parameter.rule.otherwise is None:
            return self
        named = []
        for rule in self.parameter.rule.alternatives:
            other = replace(self, parameter=replace(self.parameter, rule=rule))
            every = (piece for part in other.parts for piece in pieces(*part))
            shapes = {piece.tensor: piece.stored for piece in every if piece.tensor in source.names}
            if shapes and all(source.info(name).shape == shape for name, shape in shapes.items()):
                return other
            named += [other] if shapes else []
        return named[0] if named else other

    def tensors(self, layer: int | None) -> list[str]:
        """The checkpoint's tensors of one of its parts."""
        return list(dict.fromkeys(piece.tensor for piece in pieces(self.parameter, layer)))

    def leaves(self, form: WeightFormat, devices: int) -> Any:
        """The served form, with a Leaf for each array."""
        leaves = leaves_of(self.parameter, form, devices)
        return jax.tree.map(lambda leaf: leaf.stacked(len(self.sources)), leaves) if self.is_stacked else leaves


def abstract_decoder(partition: Partition, form: WeightFormat, *, mesh: DeviceMesh) -> AnyDecoder:
    """What ``load_decoder`` returns, of shapes alone; reads nothing."""
    decoder = _declared(partition, form.scans)
    graph, state = nnx.split(decoder)
    shapes = []
    for path, variable in nnx.to_flat_state(state):
        leaves = _served(path, variable, partition).leaves(form, partition.devices)
        shapes.append((path, variable.replace(jax.tree.map(partial(_shape, mesh=mesh), leaves))))
    merged: AnyDecoder = nnx.merge(graph, nnx.from_flat_state(shapes))
    return merged


def load_decoder(
    source: TensorSource, partition: Partition, form: WeightFormat, *, mesh: DeviceMesh, progress: Report
) -> AnyDecoder:
    """A Decoder with the weights of a source, or a DraftHead where the model is one. Raises as
    ``put`` does."""
    decoder = abstract_decoder(partition, form, mesh=mesh)
    put(source, decoder, form, mesh=mesh, progress=progress)
    return decoder


def put(source: TensorSource, decoder: AnyDecoder, form: WeightFormat, *, mesh: DeviceMesh, progress: Report) -> None:
    """Read, transform and put every tensor of a source into the served arrays of a decoder.

    The decoder has shapes alone, or weights of the same form, which are then donated. Each
    parameter of a layer is read directly into the devices' parts, and the next one meanwhile, so the
    host never has more than two. Raises ConfigurationError naming a missing, misshapen or unknown
    tensor before any read.
    """
    source, entries = matched(source, decoder)
    wanted = [part for entry, _ in entries for part in entry.parts]
    total = sum(_nbytes(parameter, form) for parameter, _ in wanted)
    placed = []
    with closing(_read_ahead(source, wanted, form, mesh)) as parts:
        placement = _Placement(parts, form, mesh, _Progress(total, progress))
        for entry, variable in entries:
            placed.append((entry.path, variable.replace(placement.fill(entry, variable.get_value()))))
    nnx.update(decoder, nnx.from_flat_state(placed))


def matched(
    source: TensorSource, decoder: AnyDecoder, *, whole: bool = True
) -> tuple[TensorSource, list[tuple[Served, nnx.Variable[Any]]]]:
    """A checkpoint's tensors as the decoder's parameters have them, and the decoder's entries.

    If not ``whole``, the source may have some of the tensors alone. Raises ConfigurationError
    naming a missing, misshapen or unknown tensor.
    """
    partition = decoder.partition
    if partition.model.unserved:
        source = TextPart(source, partition.model.unserved)
    if partition.model.base_prefix is not None:
        source = with_prefix(source, partition.model.base_prefix)
    if partition.model.published is not None:
        source = Dequantised(source, partition.model.published)
    if partition.model.head is not None:
        source = tensors_of_head(source, partition.model)
    state = nnx.to_flat_state(nnx.state(decoder))
    entries = [(_served(path, variable, partition).found_in(source), variable) for path, variable in state]
    check_tensors(source, [part for entry, _ in entries for part in entry.parts], partition.model, whole=whole)
    return source, entries


def parameter_bytes(partition: Partition, form: WeightFormat) -> int:
    """Bytes that ``load_decoder`` will allocate on each device; reads nothing."""
    return sum(
        leaf.nbytes(partition.devices)
        for entry in declared_entries(partition)
        for leaf in jax.tree.leaves(entry.leaves(form, partition.devices))
    )


def kept_in_8_bits(partition: Partition, form: WeightFormat) -> set[Role]:
    """The uses of weights of which some have plain 8 bits in a format where other kernels have 4,
    or int8 products."""
    parameters = [entry.parameter for entry in declared_entries(partition)]
    kept = (one for one in parameters if form_of(one, form, partition.devices) is Scaled)
    return {one.role for one in kept if not form.has_int8_products(one)}


def inputs_of_a_scale(partition: Partition, form: WeightFormat) -> list[tuple[str, int]]:
    """Of each kernel by its name, how many inputs are rounded by one scale: of weights in 4 bits a
    group, of products in 8 bits a device's, and else all of them."""
    kernels = (entry.parameter for entry in declared_entries(partition) if entry.parameter.inputs)
    return [(one.name, _inputs_of_a_scale(one, form, partition.devices)) for one in kernels]


def _inputs_of_a_scale(parameter: Parameter, form: WeightFormat, devices: int) -> int:
    if has_groups(parameter, form, devices) and not parameter.exact:
        return group_size(parameter, devices)
    sizes = parameter.part(devices) if form.has_int8_products(parameter) else parameter.shape
    return sizes[parameter.role.lead]


@cache
def int8_products(partition: Partition) -> frozenset[str]:
    """The names of kernels that have int8 products where a model has any.

    They are all, unless the checkpoint was made for some: then those whose modules are of these in
    every layer.
    """
    inputs = int8_inputs(partition.model.published)
    quantised = (entry for entry in declared_entries(partition) if not entry.parameter.exact)
    kernels = [entry for entry in quantised if entry.parameter.role is Role.KERNEL]
    left = set() if inputs is None else {entry.parameter.name for entry in kernels if not _are_in(inputs, entry)}
    return frozenset(entry.parameter.name for entry in kernels) - left


def _are_in(inputs: Int8Inputs, entry: Served) -> bool:
    names = (name for layer in entry.sources for name in entry.tensors(layer))
    return all(inputs.has(name.removesuffix(".weight")) for name in names)


def declared_entries(partition: Partition) -> list[Served]:
    """The entries of a model's decoder, repeated layers in one; reads nothing."""
    return entries(_declared(partition, scans=True))


def entries(decoder: AnyDecoder) -> list[Served]:
    """The entries of a decoder's state, in order."""
    return [_served(path, variable, decoder.partition) for path, variable in nnx.to_flat_state(nnx.state(decoder))]


def _declared(partition: Partition, scans: bool) -> AnyDecoder:
    if partition.model.head is not None:
        return nnx.eval_shape(lambda: draft_head(partition))
    return nnx.eval_shape(lambda: Decoder(partition, scans=scans))


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
    """Makes parameters of the devices' parts, which come in the order of the entries."""

    def __init__(self, parts: Iterator[Parts], form: WeightFormat, mesh: DeviceMesh, progress: _Progress) -> None:
        self._parts = parts
        self._form = form
        self._mesh = mesh
        self._progress = progress

    def fill(self, entry: Served, served: Any) -> Any:
        """The new arrays of an entry; ``served`` are its former arrays or shapes."""
        if not entry.is_stacked:
            jax.tree.map(delete, served)
            return self._made(entry.parameter)
        stacks = room(entry, served, self._form, self._mesh)
        for place in range(len(entry.sources)):
            stacks = jax.tree.map(partial(fill, place=np.int32(place)), stacks, self._made(entry.parameter))
        return stacks

    def _made(self, parameter: Parameter) -> Any:
        made = made_of(next(self._parts), parameter, self._form, self._mesh)
        self._progress.add(_nbytes(parameter, self._form))
        return made


def _read_ahead(
    source: TensorSource, wanted: Sequence[tuple[Parameter, int | None]], form: WeightFormat, mesh: DeviceMesh
) -> Generator[Parts]:
    """``device_parts`` of each, one after the other, read by a thread while the one before is used."""
    reader = ThreadPoolExecutor(1, "read weights")
    ahead: Future[Parts] | None = None
    try:
        for parameter, layer in wanted:
            before, ahead = ahead, reader.submit(device_parts, source, parameter, layer, form, mesh)
            if before is not None:
                yield before.result()
        if ahead is not None:
            yield ahead.result()
    finally:
        reader.shutdown(cancel_futures=True)


def room(entry: Served, served: Any, form: WeightFormat, mesh: DeviceMesh) -> Any:
    """The served stacks of an entry, or zeros where there are only shapes yet."""

    def stack(array: Any, leaf: Leaf) -> Array:
        if isinstance(array, Array):
            return array
        zeros: Array = mesh.maker(partial(jnp.zeros, leaf.shape, leaf.dtype), PartitionSpec(*leaf.split))()
        return zeros

    return jax.tree.map(stack, served, entry.leaves(form, mesh.size))
