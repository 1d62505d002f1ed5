"""TPU chips: what one can hold and move in a second, by the name that JAX gives it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip, as its maker describes it (cloud.google.com/tpu/docs, "System architecture"). Bytes and seconds."""

    hbm_bytes: int
    hbm_bandwidth: float
    """Bytes a second."""
    bf16_flops: float
    """Floating-point operations a second in bfloat16, a multiplication and its addition counted as two."""
    link_bandwidth: float
    """Bytes a second, one way, over one of its links to other chips (ICI): what it has "bidirectional" by its 4 or, where the
    links make a torus of three dimensions, 6 ports, and halved."""


CHIPS = {
    "TPU v4": Chip(32 * 2**30, 1.228e12, 275e12, 50e9),
    "TPU v5 lite": Chip(16 * 2**30, 0.819e12, 197e12, 50e9),
    "TPU v5": Chip(95 * 2**30, 2.765e12, 459e12, 100e9),
    "TPU v6 lite": Chip(32 * 2**30, 1.640e12, 918e12, 100e9),
}
"""By ``device_kind``; "lite" are v5e and v6e, "TPU v5" is v5p."""
