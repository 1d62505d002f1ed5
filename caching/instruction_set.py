"""The vector instructions that CPU kernels are built for: the processor's level, or ODRIVER_CPU_ISA's.

So a machine with AVX-512 can serve, and be tested, as one with AVX2. XLA has its own setting,
``XLA_FLAGS=--xla_cpu_max_isa=AVX2``, which it reads once, before it looks for devices.
"""

import os
import platform
from pathlib import Path

VARIABLE = "ODRIVER_CPU_ISA"
"""One of LEVELS; unset means the highest that the processor has."""

_AVX2 = ("avx2", "fma", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
LEVELS = {"baseline": (), "avx2": _AVX2, "avx512": _AVX512, "avx512vnni": (*_AVX512, "avx512_vnni")}
"""The instructions of each level, the highest last, by their names in /proc/cpuinfo.

``baseline`` is what all processors of an architecture have: SSE2 on x86-64, NEON on ARM. A library
for one processor (``-march=native``) is no faster than that for its level (BENCH_NOTES).
"""


class UnknownInstructions(Exception):
    """VARIABLE has an unknown value, or names instructions that this processor lacks."""


def level() -> str:
    """The level that serves. Raises UnknownInstructions."""
    asked, levels = os.environ.get(VARIABLE), available()
    if not asked:
        return levels[-1]
    if asked not in LEVELS:
        *others, last = LEVELS
        raise UnknownInstructions(f"{VARIABLE} must be {', '.join(others)} or {last}, not {asked!r}")
    if asked not in levels:
        raise UnknownInstructions(f"{VARIABLE} is {asked}, which this processor does not have: leave it out")
    return asked


def available() -> list[str]:
    """The levels that this processor has, the highest last."""
    instructions = set(processor().split())
    return [level for level, needed in LEVELS.items() if instructions.issuperset(needed)]


def of_architecture() -> list[str]:
    """The levels that some processor of this machine's architecture has."""
    return list(LEVELS) if platform.machine() == "x86_64" else ["baseline"]


def compiler_flags(level: str) -> tuple[str, ...]:
    """The compiler's flags for a level."""
    return tuple(f"-m{name.replace('_', '')}" for name in LEVELS[level])


def processor() -> str:
    """The processor's instructions, as /proc/cpuinfo lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + " " + next((line for line in lines if line.startswith(("flags", "Features"))), "")
