"""The C++ libraries of a step on a CPU. It imports no JAX: they compile while JAX is imported."""

from pathlib import Path

from caching.cpu_kernels import ATTENTION, load, loading, stop_compilers

LINEAR = Path(__file__).parent / "models" / "cpu" / "linear.cc"
ROWS = LINEAR.with_name("rows.cc")
DRAW = Path(__file__).parent / "sampling" / "cpu" / "draw.cc"
UNPACK = Path(__file__).parent / "step" / "cpu" / "unpack.cc"
VERIFY = Path(__file__).parent / "speculation" / "cpu" / "verify.cc"
SOURCES = (ATTENTION, LINEAR, ROWS, DRAW, UNPACK, VERIFY)
ADAPTERS = LINEAR.with_name("adapters.cc")
LATER = (ADAPTERS,)
"""Loaded when slots of adapters are first asked for."""


def start_loading() -> None:
    """Load them in the background and in parallel, compiled unless they have been."""
    for source in SOURCES:
        loading(source)


def finish_loading() -> None:
    """Raises KernelsUnavailable and UnknownInstructions."""
    start_loading()
    for source in SOURCES:
        load(source)


def stop_loading() -> None:
    """End the compilers, for a process that ends."""
    stop_compilers()
