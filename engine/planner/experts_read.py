"""Which share of its experts a chip reads in a step: an estimate, as if a router chose all equally often."""

from collections import Counter
from functools import cache

import jax
import numpy as np
from flax import nnx

from engine.models.layers.experts import ExpertsSpec
from engine.models.partition import Partition
from engine.models.weights.factory import ParameterFactory, declared
from engine.models.weights.forms import leaves_of
from engine.models.weights.weight_format import WeightFormat

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


def expert_bytes(partition: Partition, form: WeightFormat) -> dict[ExpertsSpec, int]:
    """Bytes of a chip's experts in all layers of each kind, scales included, biases not."""
    specs = Counter(block.feed_forward for block in partition.model.blocks)
    return {
        spec: layers * _bytes_a_layer(spec, partition, form)
        for spec, layers in specs.items()
        if isinstance(spec, ExpertsSpec)
    }


@cache
def _bytes_a_layer(spec: ExpertsSpec, partition: Partition, form: WeightFormat) -> int:
    devices, hidden = partition.devices, partition.model.hidden_size
    layer = nnx.eval_shape(lambda: spec.build(hidden, ParameterFactory(None, devices, 1, {})))
    kernels = (leaves_of(declared(kernel), form, devices) for kernel in (layer.gate_up_kernel, layer.down_kernel))
    return sum(leaf.nbytes(devices) for kernel in kernels for leaf in jax.tree.leaves(kernel))
