"""Which share of its experts a chip reads in a step: an estimate, as if a router chose all equally often."""

from functools import cache

import numpy as np

from engine.models.layers.experts import ExpertsSpec
from engine.models.partition import Partition

DRAWS = 32


@cache
def share_read(spec: ExpertsSpec, tokens: int, chips: int) -> float:
    """From 0 to 1, on average over DRAWS steps; of the chip with most, which the others wait for.

    Chips that split the columns of experts all read their part of the same ones.
    """
    rng, parts = np.random.default_rng(0), 1 if spec.splits_columns(chips) else chips
    most = []
    for _ in range(DRAWS):
        is_read = np.zeros(spec.num_experts, bool)
        order = rng.random((tokens, spec.num_experts)).argpartition(spec.experts_per_token - 1, axis=1)
        is_read[order[:, : spec.experts_per_token]] = True
        most.append(is_read.reshape(parts, -1).mean(axis=1).max())
    return float(np.mean(most))


def expert_bytes(partition: Partition, dtype: np.dtype) -> dict[ExpertsSpec, int]:
    """Bytes of a chip's experts in all layers of each kind, without biases and scales."""
    found: dict[ExpertsSpec, int] = {}
    for block in partition.model.blocks:
        if isinstance(spec := block.feed_forward, ExpertsSpec):
            numbers = 3 * spec.num_experts * spec.intermediate_size * partition.model.hidden_size
            found[spec] = found.get(spec, 0) + numbers // partition.devices * dtype.itemsize
    return found
