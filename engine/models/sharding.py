"""How a decoder is split over devices: heads, feed-forward and vocabulary, each device with its own part of every layer.

A layer's first products are split by their outputs and its last ones by their inputs, so that two sums over the devices,
after attention and after the feed-forward, are all that a layer says between them (Shoeybi et al. 2019).
"""

import re
from dataclasses import replace

from jax.sharding import PartitionSpec

from engine.errors import ConfigurationError
from engine.mesh import TP
from engine.models.config import ModelConfig

SPECS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embedding$|lm_head$", PartitionSpec(TP, None)),
    (r"qkv_kernel$", PartitionSpec(None, TP, None, None)),
    (r"qkv_bias$", PartitionSpec(TP, None, None)),
    (r"gate_up_kernel$", PartitionSpec(None, None, TP)),
    (r"gate_up_bias$", PartitionSpec(None, TP)),
    (r"(o|down)_kernel$", PartitionSpec(TP, None)),
    (r"(o|down)_bias$|scale$", PartitionSpec()),
)
"""By the name of a parameter, which of its axes is split; those after a sum are whole everywhere."""


def spec_of(name: str) -> PartitionSpec:
    """How a parameter of a layer is split. Every parameter has a rule, so that none is copied without a word."""
    return next(spec for pattern, spec in SPECS if re.search(pattern, name))


def part_of(name: str, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """The shape of one device's part of a parameter."""
    spec = (*spec_of(name), *[None] * len(shape))
    return tuple(size // devices if axis == TP else size for size, axis in zip(shape, spec, strict=False))


def flat_spec(spec: PartitionSpec) -> PartitionSpec:
    """How a kernel [in, *out] that is split by ``spec`` is split as a matrix: each device's part is flattened by itself."""
    first, *others = spec
    return PartitionSpec(first, TP if TP in others else None)


def spread(config: ModelConfig, devices: int) -> ModelConfig:
    """A model as so many devices serve it. Raises ConfigurationError naming what does not divide."""
    if fault := _fault(config, devices):
        raise ConfigurationError(
            f"tensor_parallel_size {devices} does not divide {fault}; it can be {_listed(_divisors(config, devices))}"
        )
    return replace(config, tensor_parallel_size=devices)


def most_devices(config: ModelConfig, devices: int) -> int:
    """The largest number of devices, of so many, that a model can be spread over."""
    return max(_divisors(config, devices))


def _divisors(config: ModelConfig, most: int) -> list[int]:
    return [count for count in range(1, most + 1) if _fault(config, count) is None]


def _fault(config: ModelConfig, devices: int) -> str | None:
    """What of a model cannot be split evenly, in words."""
    if config.num_heads % devices:
        return f"the {config.num_heads} attention heads"
    if config.intermediate_size % devices:
        return f"the {config.intermediate_size} columns of the feed-forward"
    kv_heads = config.num_kv_heads
    if kv_heads % devices and devices % kv_heads:
        return f"the {kv_heads} kv heads, nor they it"
    return None


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
