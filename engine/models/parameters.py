"""Each parameter of our decoder, and the tensors of a Hugging Face checkpoint that it is made of.

A parameter is one tensor, or several fused side by side (q, k and v; gate and up): these lie along the last
but one of its output axes, where the first tensor fills what the others, one wide each, leave of it.
"""

import math
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.checkpoint import Checkpoint

Index = tuple[slice, ...]
"""One slice per axis: the part of an array that lies on one device."""


class Layout(Enum):
    """How a parameter lies in the checkpoint, and here."""

    VECTOR = auto()
    """[out] there, [*out] here: biases and norm scales."""
    TABLE = auto()
    """[out, in] in both: embeddings."""
    KERNEL = auto()
    """[out, in] there, [in, *out] here: activations multiply from the left."""


def _projections(module: str, names: str, kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.*.{module}.{name}_proj.{kind}" for name in names.split())


TENSORS: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "embedding": (Layout.TABLE, ("model.embed_tokens.weight",)),
    "layers.*.attention_norm.scale": (Layout.VECTOR, ("model.layers.*.input_layernorm.weight",)),
    "layers.*.attention.qkv_kernel": (Layout.KERNEL, _projections("self_attn", "q k v", "weight")),
    "layers.*.attention.qkv_bias": (Layout.VECTOR, _projections("self_attn", "q k v", "bias")),
    "layers.*.attention.q_norm.scale": (Layout.VECTOR, ("model.layers.*.self_attn.q_norm.weight",)),
    "layers.*.attention.k_norm.scale": (Layout.VECTOR, ("model.layers.*.self_attn.k_norm.weight",)),
    "layers.*.attention.o_kernel": (Layout.KERNEL, _projections("self_attn", "o", "weight")),
    "layers.*.attention.o_bias": (Layout.VECTOR, _projections("self_attn", "o", "bias")),
    "layers.*.mlp_norm.scale": (Layout.VECTOR, ("model.layers.*.post_attention_layernorm.weight",)),
    "layers.*.mlp.gate_up_kernel": (Layout.KERNEL, _projections("mlp", "gate up", "weight")),
    "layers.*.mlp.gate_up_bias": (Layout.VECTOR, _projections("mlp", "gate up", "bias")),
    "layers.*.mlp.down_kernel": (Layout.KERNEL, _projections("mlp", "down", "weight")),
    "layers.*.mlp.down_bias": (Layout.VECTOR, _projections("mlp", "down", "bias")),
    "norm.scale": (Layout.VECTOR, ("model.norm.weight",)),
    "lm_head": (Layout.TABLE, ("lm_head.weight",)),
}
"""A pattern per parameter; the star is the number of a layer."""


@dataclass(frozen=True)
class Piece:
    """One tensor's place within a parameter, the parameter's axes in the checkpoint's order: [*out, in] or [*out]."""

    tensor: str
    stored: tuple[int, ...]
    """The tensor's shape in the checkpoint."""
    out: tuple[int, ...]
    """Its first axis, told apart into the parameter's output axes."""
    region: Index
    """Where it lies within the parameter."""
    repeats: int = 1
    """How often each entry of the first axis lies there, one after the other: kv heads that several devices have."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the decoder: ``layers.0.mlp.down_kernel``, its shape, and the dtype it is served in."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kv_replicas: int = 1
    """How often each kv head lies in it, where it has kv heads (ModelConfig.kv_replicas)."""
    padding: int = 0
    """Rows of zeros at the end of a table that the checkpoint does not have."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def layout(self) -> Layout:
        """How it lies in the checkpoint."""
        return TENSORS[self._pattern][0]

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors it is made of."""
        number = re.search(r"\.(\d+)\.", self.name)
        return [name.replace("*", number[1] if number else "*") for name in TENSORS[self._pattern][1]]

    @property
    def pieces(self) -> list[Piece]:
        """The tensors it is made of, side by side along the fused axis."""
        inner = {Layout.VECTOR: (), Layout.TABLE: self.shape[-1:], Layout.KERNEL: self.shape[:1]}[self.layout]
        out = self.shape[1:] if self.layout is Layout.KERNEL else self.shape[: len(self.shape) - len(inner)]
        if len(self.tensors) == 1:
            return [Piece(self.tensors[0], (math.prod(out) - self.padding, *inner), out, ())]
        *lead, width, last = out
        edges = [0, *range(width - len(self.tensors) + 1, width + 1)]
        repeats = [1, *[self.kv_replicas] * (len(self.tensors) - 1)]
        return [
            Piece(
                tensor,
                (math.prod(lead) // often * (stop - start) * last, *inner),
                (*lead, stop - start, last),
                (*[slice(None)] * len(lead), slice(start, stop)),
                often,
            )
            for tensor, start, stop, often in zip(self.tensors, edges[:-1], edges[1:], repeats, strict=True)
        ]

    @property
    def _pattern(self) -> str:
        return re.sub(r"\.\d+\.", ".*.", self.name)


def assemble(checkpoint: Checkpoint, parameter: Parameter, index: Index) -> NDArray[Any]:
    """The part of a parameter that ``index`` selects, read from the checkpoint; the fused axis is always whole."""
    sizes = [len(range(*chosen.indices(size))) for chosen, size in zip(index, parameter.shape, strict=True)]
    part = np.empty(sizes, parameter.dtype)
    as_stored = part
    if parameter.layout is Layout.KERNEL:
        as_stored, index = np.moveaxis(part, 0, -1), (*index[1:], index[0])
    for piece in parameter.pieces:
        as_stored[piece.region] = _read(checkpoint, piece, index)
    return part


def _read(checkpoint: Checkpoint, piece: Piece, index: Index) -> NDArray[Any]:
    """The part of one tensor that ``index`` selects: no rows or columns beside it are read for the widest axis."""
    out = piece.out
    lead = next((axis for axis, size in enumerate(out) if size > 1), 0)
    start, stop, _ = index[lead].indices(out[lead])
    row = math.prod(out[lead + 1 :])
    first, past = start // piece.repeats, -(-stop // piece.repeats)
    end = min(past * row, piece.stored[0])  # rows past the last pad a table
    stored = checkpoint.read(piece.tensor, (slice(min(first * row, end - 1), end), *index[len(out) :]))
    stored = stored[: max(0, end - first * row)]
    missing = (past - first) * row - len(stored)
    stored = np.pad(stored, ((0, missing), *[(0, 0)] * (stored.ndim - 1))) if missing else stored
    block = stored.reshape(*out[:lead], past - first, *out[lead + 1 :], *stored.shape[1:])
    if piece.repeats > 1:
        block = np.repeat(block, piece.repeats, lead)[start - first * piece.repeats :][: stop - start]
    return block[(slice(None),) * (lead + 1) + index[lead + 1 : len(out)]]
