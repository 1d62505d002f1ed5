"""TPU chips: memory, bandwidth and arithmetic, by the name that JAX gives them."""

from dataclasses import dataclass

LANES, SUBLANES = 128, 8
"""A vector register is LANES * SUBLANES numbers of 32 bits."""

VMEM_LIMIT_BYTES = 64 * 2**20
"""Of the 128 MiB of a v5e or v6e; the compiler's default of 16 MiB is too small for wide heads of attention."""


@dataclass(frozen=True)
class Chip:
    """One chip by Google's specification (cloud.google.com/tpu/docs, "System architecture")."""

    hbm_bytes: int
    hbm_bandwidth: float
    """Bytes per second."""
    bf16_flops: float
    """Floating-point operations per second in bfloat16; a multiply-add counts as two."""
    int8_ops: float
    """The same of int8 numbers, with sums of int32."""
    link_bandwidth: float
    """Bytes per second, one way, over one ICI link: half of the "bidirectional" figure divided
    by the 4 ports of a chip, or 6 in a torus of three dimensions."""
    host_bandwidth: float
    """Bytes per second, one way, over PCIe between a chip and its host's memory: as in "How to
    Scale Your Model" (Austin et al. 2025, jax-ml.github.io/scaling-book), chapter "TPUs"."""


CHIPS = {
    "TPU v4": Chip(32 * 2**30, 1.228e12, 275e12, 275e12, 50e9, 15e9),
    "TPU v5 lite": Chip(16 * 2**30, 0.819e12, 197e12, 394e12, 50e9, 15e9),
    "TPU v5": Chip(95 * 2**30, 2.765e12, 459e12, 918e12, 100e9, 15e9),
    "TPU v6 lite": Chip(32 * 2**30, 1.640e12, 918e12, 1836e12, 100e9, 32e9),
}
"""By ``device_kind``; "lite" are v5e and v6e, "TPU v5" is v5p."""
