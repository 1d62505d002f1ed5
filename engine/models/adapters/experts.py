"""The kernels of experts, and where an adapter's factors are beside them.

PEFT adapts experts in either of two ways. Experts that are modules have factors by themselves, as
other modules do. Experts that are one tensor in transformers 5 (``target_parameters``) have theirs
in one tensor each, in which gate and up share ``a``. In a slot each expert and part has its own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.devices.mesh import TP
from engine.models.adapters.adapted_experts import AdaptedExperts, GroupedExperts, MaskedExperts
from engine.models.adapters.kernels import Factors, WithSlots, whole_rank
from engine.models.weights import panels
from engine.models.weights.forms import Dense
from engine.models.weights.parameters import TensorRule
from engine.models.weights.weight_format import Layout, Leaf

GATE_UP, FFN = "gate_up", "ffn"


@dataclass(frozen=True)
class AdaptedExpertsKernel(WithSlots):
    """The kernels of a layer's experts, beside which each expert has factors."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """What transformers calls its parts as modules."""
        if GATE_UP not in self.parameter.names:
            return ("down_proj",)
        return ("gate_proj", "up_proj") if dict(self.parameter.axes)[GATE_UP] == 2 else ("up_proj",)

    @property
    def fused(self) -> str:
        """What transformers calls the tensor of all experts."""
        return "gate_up_proj" if len(self.parts) > 1 else self.parts[0]

    def container(self, layer: int | None) -> str:
        """The module of all experts, as checkpoints name it."""
        rules = self._rules
        by_expert = next((rule.tensors[0] for rule in rules if "{experts}" in rule.tensors[0]), None)
        if by_expert is not None:
            return by_expert.partition(".{experts}")[0].format(layer=layer)
        return rules[0].tensors[0].rpartition(".")[0].format(layer=layer)

    @property
    def num_experts(self) -> int:
        """The experts of a layer."""
        return self.parameter.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """One part of one expert, [out, in]."""
        _, inputs, *out = self.parameter.shape
        return int(np.prod(out)) // len(self.parts), inputs

    def names(self, layer: int | None) -> tuple[str, ...]:
        """Of each part; what it has there is f[experts, rank, in] and f[experts, out, rank]."""
        return tuple(f"{self.container(layer)}.*.{part}" for part in self.parts)

    def modules(self, layer: int | None) -> Iterator[tuple[str, int, int]]:
        """The weight of each expert by itself in checkpoints, the number of its part, and its own."""
        names = {rule.tensors for rule in self._rules if "{experts}" in rule.tensors[0]}
        names.add(tuple(f"{self.container(layer)}.{{experts}}.{part}.weight" for part in self.parts))
        for templates in names:
            for number, template in enumerate(templates):
                for expert in range(self.num_experts):
                    yield template.format(layer=layer, experts=expert), number, expert

    def apart(self, b: NDArray[Any]) -> list[NDArray[Any]]:
        """f[experts, all outputs, rank] as the tensor of all experts has them -> of each part."""
        if len(self.parts) == 1:
            return [b]
        stored = next((rule.stored for rule in self._rules if rule.stored), "")
        if re.search(rf"\({FFN} {GATE_UP}\)", stored):
            return [b[:, number :: len(self.parts)] for number in range(len(self.parts))]
        return np.split(b, len(self.parts), axis=1)

    def block(self, layer: int | None, a: Factors, b: Factors) -> list[NDArray[Any]]:
        """See AdaptedWeight. What a part lacks is zeros."""
        (out, inputs), experts = self.shape, self.num_experts
        nothing_a, nothing_b = np.zeros((experts, self.rank, inputs)), np.zeros((experts, out, self.rank))
        low = [a.arrays.get(name, nothing_a) for name in self.names(layer)]
        high = [b.arrays.get(name, nothing_b) for name in self.names(layer)]
        if self.layout is not Layout.PANELS:
            return [each.swapaxes(1, 2) for each in (*low, *high)]
        missing = whole_rank(self.rank) - self.rank
        return [
            *(panels.in_panels(np.pad(each, [(0, 0), (0, missing), (0, 0)])) for each in low),
            *(panels.in_panels(np.pad(each, [(0, 0), (0, 0), (0, missing)])) for each in high),
        ]

    def leaves(self, slots: int) -> list[Leaf]:
        """f[experts, in, slots * rank] of each part, and f[experts, slots * rank, its outputs]; in
        panels with an axis of slots before them."""
        (out, inputs), experts, count = self.shape, self.num_experts, len(self.parts)
        if self.layout is Layout.PANELS:
            rank = whole_rank(self.rank)
            low, high = panels.panels_shape(rank, inputs), panels.panels_shape(out, rank)
            return [Leaf((slots, experts, *shape), self.dtype) for shape in (*[low] * count, *[high] * count)]
        by_expert, by_input, *others = self.parameter.served_split
        by_output, columns = TP if TP in others else None, slots * self.rank
        low_leaf = Leaf((experts, inputs, columns), self.dtype, (by_expert, by_input, None))
        high_leaf = Leaf((experts, columns, out), self.dtype, (by_expert, None, by_output))
        leaves = [*[low_leaf] * count, *[high_leaf] * count]
        return self.of_all_layers(leaves)

    @property
    def slot_axes(self) -> list[int]:
        """See AdaptedWeight."""
        count = len(self.parts)
        return [-5] * 2 * count if self.layout is Layout.PANELS else [-1] * count + [-2] * count

    def around(self, value: Any, arrays: tuple[Array, ...]) -> Any:
        """See AdaptedWeight."""
        low, high = arrays[: len(self.parts)], arrays[len(self.parts) :]
        if self.layout is Layout.PANELS:
            return AdaptedExperts(value, GroupedExperts(low, high, self.shape[0]))
        forms = [tuple(Dense(one, self.layout, one.shape[-1:]) for one in each) for each in (low, high)]
        return AdaptedExperts(value, MaskedExperts(*forms))

    @property
    def _rules(self) -> tuple[TensorRule, ...]:
        """The rule, and those for checkpoints that have experts otherwise."""
        return self.parameter.rule.alternatives
