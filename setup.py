"""What a wheel has compiled: the CPU's kernels, for all processors of the machine's architecture. All metadata is in setup.cfg.

They need a C++ compiler and jaxlib's headers. Without these the wheel is for any machine, which then compiles what it needs.
"""

import os
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

from caching import cpu_kernels, instruction_set
from engine.cpu_libraries import LATER, SOURCES

ROOT = Path(__file__).parent.resolve()


def obstacle() -> str | None:
    """Why no kernels can be compiled here, if that is so."""
    try:
        cpu_kernels.compiler()
        cpu_kernels.xla_headers()
    except cpu_kernels.KernelsUnavailable as unavailable:
        return str(unavailable)
    return None


class BuildKernels(Command):
    """Compiles the libraries; an editable installation compiles them for its own machine when it starts."""

    user_options: ClassVar = [("build-lib=", None, "the directory of what is built")]
    editable_mode = False

    def initialize_options(self) -> None:
        """Setuptools asks for it."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Setuptools asks for it."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Nothing, for an editable installation."""
        assert self.build_lib is not None
        directory = Path(self.build_lib) / cpu_kernels.SHIPPED.resolve().relative_to(ROOT)
        if self.editable_mode:
            return
        if without := obstacle():
            self.warn(f"the wheel has no kernels for CPUs, which each machine then compiles: {without}")
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            levels = instruction_set.of_architecture()
            jobs = [
                pool.submit(cpu_kernels.compile_library, source, level, directory)
                for source, level in product((*SOURCES, *LATER), levels)
            ]
            for job in jobs:
                job.result()


class Build(build):
    """Of what the clone has now: setuptools keeps what an earlier build had, and would pack that too."""

    def run(self) -> None:
        """Begins with an empty directory where that is one in the clone; others are not ours to empty."""
        if ROOT in Path(self.build_lib).resolve().parents:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


build.sub_commands.append(("build_kernels", None))
# Nothing depends on the version of Python: the wheel is for all of them, on this platform.
platform = {} if obstacle() else {"bdist_wheel": {"plat_name": sysconfig.get_platform()}}
setup(cmdclass={"build": Build, "build_kernels": BuildKernels}, options=platform)
