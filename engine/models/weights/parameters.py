"""A parameter's declaration: its logical axes, and where a checkpoint has it.

All else follows from the axes: the split over devices (AXES), the stack over layers, packing and
quantisation (forms.py), and the part of each tensor that a device reads (pieces.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from numpy.typing import NDArray

from engine.devices.mesh import TP

AXES: Mapping[str, str | None] = {
    "vocabulary": TP,
    "heads": TP,
    "kv_heads": TP,
    "groups": TP,
    "ffn": TP,
    "hidden": None,
    "positions": None,
    "group": None,
    "head_dim": None,
    "columns": None,
    "taps": None,
    "gate_up": None,
    "experts": TP,
    "scores": None,
    "layers": None,
    "per_layer": None,
    "latent": None,
    "rank": None,
}
"""The mesh axis that each logical axis is split over; None is whole on every device.

A layer's first products are split by outputs and its last by inputs, so a layer needs only two
all-reduces: after attention and after the feed-forward (Shoeybi et al. 2019).
"""

LAYER = "model.layers.{layer}."
"""The prefix of a layer's tensors in most checkpoints."""
TOKENS = "d2t"
"""A draft head's tensor of the tokens that it drafts: each one's id, less its own number."""


class Role(Enum):
    """The use of a parameter."""

    VECTOR = auto()
    """[*out]: biases, norm scales and small arrays, never quantised."""
    TABLE = auto()
    """[vocabulary, hidden]: embedding and head."""
    KERNEL = auto()
    """[*inputs, *out]: activations multiply from the left."""
    EXPERTS = auto()
    """[experts, *inputs, *out]: a kernel for each expert."""

    @property
    def lead(self) -> int:
        """The axes before a kernel's inputs."""
        return 1 if self is Role.EXPERTS else 0


@dataclass(frozen=True)
class TensorRule:
    """A parameter in a checkpoint: one tensor, or several along one axis.

    A name may have fields ``{layer}`` and the parameter's axes: ``experts.{experts}.w1.weight`` is
    one tensor for each index of the axis ``experts``. If a name occurs several times, one tensor
    has these parts one after the other, and is cut.
    """

    tensors: tuple[str, ...]
    along: str | None = None
    """The axis of several tensors: each takes one index of it, the first all that are left."""
    sizes: tuple[int, ...] = ()
    """What each of them takes of it instead."""
    repeated: tuple[int, ...] | None = None
    """Of which of them a device has copies, if it shares a kv head or group with others; by
    default all after the first."""
    stored: str | None = None
    """The tensor's axes by the parameter's names: ``"experts (gate_up ffn) hidden"`` joins two,
    and ``()`` is an axis of length 1; ``""`` is one number without axes.

    By default a kernel is stored as in torch, ``"(*out) (*inputs)"``, those of several experts as
    ``"experts (*out) (*inputs)"``, and all else as declared.
    """
    transform: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    """Applied to float32 numbers, each by itself."""
    otherwise: "TensorRule | None" = None
    """The rule for a checkpoint without these tensors, or with others of these names."""

    @property
    def alternatives(self) -> "tuple[TensorRule, ...]":
        """The rule and those that it names, the usual one first."""
        return (self,) if self.otherwise is None else (self, *self.otherwise.alternatives)


def tensors(
    *names: str,
    along: str | None = None,
    sizes: tuple[int, ...] = (),
    repeated: tuple[int, ...] | None = None,
    stored: str | None = None,
    transform: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
) -> TensorRule:
    """A TensorRule with the names as arguments."""
    return TensorRule(names, along, sizes, repeated, stored, transform)


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of all layers. Hashable, as metadata of an ``nnx.Param``."""

    name: str
    """Within its layer, like ``attention.qkv_kernel``: the key of a family's rule for it."""
    role: Role
    axes: tuple[tuple[str, int], ...]
    """Names and sizes over all devices; a kernel's inputs come first, before them the experts."""
    rule: TensorRule
    inputs: int = 0
    """How many of the axes a product contracts; they are one axis of the served array."""
    kv_replicas: int = 1
    """Copies of each kv head or group of the rule's ``repeated`` tensors, one per device that
    needs it."""
    padding: int = 0
    """Rows of zeros at the end of a table, or of a bias of logits, that the checkpoint does not have."""
    exact: bool = False
    """It stays float32, whatever the dtype of the model."""
    whole: str | None = None
    """An axis that is whole on every device, though AXES splits it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, over all devices together."""
        return tuple(size for _, size in self.axes)

    @property
    def split(self) -> tuple[str | None, ...]:
        """The mesh axis that each axis is split over."""
        return tuple(None if name == self.whole else AXES[name] for name in self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the served array: [in, *out] for a kernel, [experts, in, *out] for many."""
        return self.as_served(self.sizes)

    @property
    def served_split(self) -> tuple[str | None, ...]:
        """The mesh axis of each axis of the served array; the first of several inputs decides."""
        lead = self.role.lead
        return (*self.split[: lead + 1], *self.split[lead + max(1, self.inputs) :])

    def as_served(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of an array, or of one device's part of it, with the inputs joined."""
        lead, outputs = self.role.lead, self.role.lead + self.inputs
        return (*sizes[:lead], math.prod(sizes[lead:outputs]), *sizes[outputs:]) if self.inputs else sizes

    def part(self, devices: int) -> tuple[int, ...]:
        """The shape of one device's part of the served array."""
        axes = zip(self.shape, self.served_split, strict=True)
        return tuple(size // devices if axis == TP else size for size, axis in axes)

    def out(self, devices: int) -> tuple[int, ...]:
        """The output axes of one device's part: the shape of a product's last axis."""
        part = self.part(devices)
        return part[:1] if self.role is Role.TABLE else part[self.role.lead + 1 :]
