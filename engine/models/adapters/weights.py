"""The weights of a decoder that may have adapters."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from engine.models.adapters.experts import AdaptedExpertsKernel
from engine.models.adapters.kernels import AdaptedKernel, AdaptedWeight, is_linear
from engine.models.adapters.latents import PROJECTION, AdaptedProjection, kernel_of
from engine.models.adapters.split_models import splits_residual
from engine.models.adapters.tables import AdaptedEmbedding, AdaptedHead, embedding_of, head_of
from engine.models.partition import Partition
from engine.models.weights.parameters import Role
from engine.models.weights.store import Served
from engine.models.weights.weight_format import Layout

TABLES = ("embedding", "lm_head")
"""Names of parameters."""


def adapted_weights(
    entries: Collection[Served], partition: Partition, rank: int, dtype: np.dtype[Any], layout: Layout
) -> Iterator[AdaptedWeight]:
    """The modules [out, in] of a decoder's entries, its experts, the projections of latents, the
    embedding and the head.

    A table that is both comes twice.
    """
    devices, splits_all = partition.devices, splits_residual(partition)
    has_head = any(entry.parameter.name == TABLES[1] for entry in entries)
    for entry in entries:
        parameter = entry.parameter
        numbers = np.dtype(np.float32) if parameter.exact else dtype
        if parameter.role is Role.KERNEL and is_linear(parameter):
            yield AdaptedKernel(entry, rank, devices, numbers, layout, splits_all)
        elif parameter.role is Role.EXPERTS:
            yield AdaptedExpertsKernel(entry, rank, devices, numbers, layout)
        elif parameter.name == PROJECTION:
            projection = replace(entry, parameter=kernel_of(parameter))
            yield AdaptedProjection(projection, rank, devices, numbers, Layout.MATRIX)
        elif parameter.role is Role.TABLE and parameter.name in TABLES:
            if parameter.name == TABLES[0]:
                embedding = replace(entry, parameter=embedding_of(parameter))
                yield AdaptedEmbedding(embedding, rank, devices, numbers, layout)
            if parameter.name == TABLES[1] or not has_head:
                yield AdaptedHead(replace(entry, parameter=head_of(parameter)), rank, devices, numbers, layout)


def has_room(weight: AdaptedWeight, targets: tuple[str, ...]) -> bool:
    """Whether slots have room for a weight, if they have for the modules whose names end so; by
    default it is for all but experts."""
    if not targets:
        return not isinstance(weight, AdaptedExpertsKernel)
    return any(f".{name}".endswith(f".{target}") for name in _modules(weight) for target in targets)


def _modules(weight: AdaptedWeight) -> Iterator[str]:
    """The names of a weight's modules in all layers."""
    for layer in weight.entry.sources:
        if isinstance(weight, AdaptedExpertsKernel):
            yield weight.container(layer)
            yield f"{weight.container(layer)}.{weight.fused}"
            yield from (name.removesuffix(".weight") for name, _, _ in weight.modules(layer))
        else:
            yield from (name.removesuffix(".weight") for name in weight.names(layer))
