"""Which of a processor's vector instructions the CPU kernels are built for: all that it has, or those of ODRIVER_CPU_ISA.

A machine that has the larger set can so serve, and be tested, as one that has the smaller. XLA is held to the same by
``XLA_FLAGS=--xla_cpu_max_isa=AVX2``, which it reads once, before it looks for devices.
"""

import os
import platform
from pathlib import Path

VARIABLE = "ODRIVER_CPU_ISA"
"""``avx2`` or ``avx512``; without it, what the processor has."""

FLAGS = {"avx2": ("-march=native", "-mno-avx512f"), "avx512": ("-march=native",)}
"""The compiler's, by the value of VARIABLE."""
NEEDED = {"avx2": "avx2", "avx512": "avx512f"}
"""What /proc/cpuinfo calls them."""


class UnknownInstructions(Exception):
    """VARIABLE names none, or such that this processor lacks."""


def compiler_flags() -> tuple[str, ...]:
    """What has the compiler use these instructions. Raises UnknownInstructions."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return ("-march=native",)
    if asked not in FLAGS:
        raise UnknownInstructions(f"{VARIABLE} must be {' or '.join(FLAGS)}, not {asked!r}")
    if NEEDED[asked] not in processor().split():
        raise UnknownInstructions(f"{VARIABLE} is {asked}, which this processor does not have: leave it out")
    return FLAGS[asked]


def available() -> list[str]:
    """The values of VARIABLE that this processor can do with."""
    return [name for name, needed in NEEDED.items() if needed in processor().split()]


def processor() -> str:
    """The instructions this processor has; what ``-march=native`` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + " " + next((line for line in lines if line.startswith(("flags", "Features"))), "")
