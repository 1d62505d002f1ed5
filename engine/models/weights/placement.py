"""A parameter of one layer on the devices: read for each of them, put there, and made its served form."""

from functools import partial
from typing import Any

import jax
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import DeviceMesh
from engine.models.weights.forms import Dense, dense_leaf, form_of
from engine.models.weights.parameters import Parameter, Role
from engine.models.weights.pieces import assemble
from engine.models.weights.sources.tensor_source import TensorSource
from engine.models.weights.weight_format import Layout, WeightFormat

Parts = list[NDArray[Any]]
"""The part of each of this process's devices."""


def device_parts(
    source: TensorSource, parameter: Parameter, layer: int | None, form: WeightFormat, mesh: DeviceMesh
) -> Parts:
    """Each of this process's devices' part, read for it alone; not quantised or packed."""
    leaf, padding = dense_leaf(parameter, form), table_padding(parameter, form)
    read = [assemble(source, parameter, layer, at, leaf.dtype, padding) for at in device_indices(parameter, mesh)]
    return [as_leaf(part, parameter, form) for part in read]


def device_indices(parameter: Parameter, mesh: DeviceMesh) -> list[tuple[slice, ...]]:
    """For each of this process's devices, in the mesh's order, the index of its part."""
    indices = mesh.sharding(*parameter.split).addressable_devices_indices_map(parameter.sizes)
    return [index for index in indices.values() if index is not None]


def table_padding(parameter: Parameter, form: WeightFormat) -> int:
    """Columns of zeros at the end of a table's array."""
    return dense_leaf(parameter, form).shape[-1] - parameter.sizes[-1] if parameter.role is Role.TABLE else 0


def as_leaf(part: NDArray[Any], parameter: Parameter, form: WeightFormat) -> NDArray[Any]:
    """A device's part [*axes] with the axes of the parameter's ``dense_leaf``."""
    sizes, axes = parameter.as_served(part.shape), len(dense_leaf(parameter, form).shape)
    return part.reshape(sizes if len(sizes) == axes else (*sizes[: axes - 1], -1))


def made_of(parts: Parts, parameter: Parameter, form: WeightFormat, mesh: DeviceMesh) -> Any:
    """The served form of a parameter of one layer, of each device's part."""
    kind, leaf = form_of(parameter, form, mesh.size), dense_leaf(parameter, form)
    if kind is Dense and form.layout is Layout.PANELS:  # which the host makes, for its one device
        return jax.block_until_ready(kind.made_of(parts[0], parameter, form, mesh))
    devices = mesh.sharding(*parameter.split).addressable_devices_indices_map(parameter.sizes)
    placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    values = jax.make_array_from_single_device_arrays(leaf.shape, mesh.sharding(*leaf.split), placed)
    jax.block_until_ready(values)  # pending transfers would hold their parameters on the host
    return values if kind is None else kind.made_of(values, parameter, form, mesh)


def delete(served: Any) -> None:
    """Free an array; a shape has no memory."""
    if isinstance(served, Array):
        served.delete()


@partial(jax.jit, donate_argnums=0)
def fill(stack: Array, layer: Array, place: Array) -> Array:
    """A stack, which is donated, with the array of one layer at its place."""
    filled: Array = jax.lax.dynamic_update_index_in_dim(stack, layer, place, 0)
    return filled
