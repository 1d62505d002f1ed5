"""The vector instructions that CPU kernels are built for: the processor's, or ODRIVER_CPU_ISA's.

So a machine with AVX-512 can serve, and be tested, as one with AVX2. XLA has its own setting,
``XLA_FLAGS=--xla_cpu_max_isa=AVX2``, which it reads once, before it looks for devices.
"""

import os
import platform
from pathlib import Path

VARIABLE = "ODRIVER_CPU_ISA"
"""``avx2`` or ``avx512``; unset means all that the processor has."""

FLAGS = {"avx2": ("-march=native", "-mno-avx512f"), "avx512": ("-march=native",)}
"""Compiler flags by the value of VARIABLE."""
NEEDED = {"avx2": "avx2", "avx512": "avx512f"}
"""Their names in /proc/cpuinfo."""


class UnknownInstructions(Exception):
    """VARIABLE has an unknown value, or names instructions that this processor lacks."""


def compiler_flags() -> tuple[str, ...]:
    """The compiler's flags for these instructions. Raises UnknownInstructions."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return ("-march=native",)
    if asked not in FLAGS:
        raise UnknownInstructions(f"{VARIABLE} must be {' or '.join(FLAGS)}, not {asked!r}")
    if NEEDED[asked] not in processor().split():
        raise UnknownInstructions(f"{VARIABLE} is {asked}, which this processor does not have: leave it out")
    return FLAGS[asked]


def available() -> list[str]:
    """The values of VARIABLE that this processor supports."""
    return [name for name, needed in NEEDED.items() if needed in processor().split()]


def processor() -> str:
    """The processor's instructions, as /proc/cpuinfo lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + " " + next((line for line in lines if line.startswith(("flags", "Features"))), "")
