"""What XLA_FLAGS are in tests and in processes that they start."""

import os
from importlib.metadata import version

from packaging.version import Version

from caching import instruction_set

MAX_ISA = {"baseline": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512", "avx512vnni": "AVX512"}
"""What XLA calls the instructions, by the value of ODRIVER_CPU_ISA."""
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if Version(version("jaxlib")) < Version(
    "0.11"
):  # later ones know no other way, and end a process that is given this flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
"""Less than half the time to compile, which is most of what an engine's tests take: no optimisation, a function is not cut into
parts for more threads than there are cores, and fusions are written without the passes of MLIR. scripts/test --all compiles
what is not thorough as the daemon does."""


def xla_flags(devices: int = 1) -> str:
    """As many CPU devices, and the instructions to which ODRIVER_CPU_ISA holds our kernels, for XLA too."""
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    if QUICK in os.environ.get("XLA_FLAGS", ""):
        flags.append(QUICK)
    if isa := os.environ.get(instruction_set.VARIABLE):
        flags.append(f"--xla_cpu_max_isa={MAX_ISA[isa]}")
    return " ".join(flags)
