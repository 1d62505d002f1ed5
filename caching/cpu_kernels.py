"""Kernels in C++ for the CPU: compiled where they run, kept for the next start, and known to XLA from then on.

XLA:CPU packs a weight anew for each product of a few rows and gathers pages before it reads them, at half the speed of
the machine. Kernels of our own do without both. They need a C++ compiler (``CXX``, or c++, g++ or clang++ on the PATH);
where there is none, XLA's own operations serve.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import jax
import jaxlib.version

from caching.instruction_set import compiler_flags, processor

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
HEADERS = Path(__file__).parent / "cpu"


class KernelsUnavailable(Exception):
    """There are no kernels of our own on this machine; the text says why and what would help."""


def cache_home() -> Path:
    """Where what is compiled stays between starts, as XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odriver"


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library made of a source file, compiled if that has not been done on a machine like this one.

    Raises KernelsUnavailable and UnknownInstructions.
    """
    compiler = _compiler()
    library = cache_home() / "kernels" / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    if not library.exists():
        _compile(compiler, source, library)
    return ctypes.CDLL(str(library))


def register(library: ctypes.CDLL, name: str) -> None:
    """Let XLA call the handler ``name`` of a library."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise KernelsUnavailable(f"no C++ compiler {asked or 'on the PATH'}: install g++ for about twice the speed")


def _fingerprint(compiler: str, source: Path) -> str:
    """What a library depends on: the source, what compiles it, what it is linked into, and the processor."""
    parts = [source.read_bytes(), *(header.read_bytes() for header in sorted(HEADERS.glob("*.h")))]
    texts = [*FLAGS, *compiler_flags(), compiler, jaxlib.version.__version__, processor()]
    parts += [text.encode() for text in texts]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = library.with_suffix(f".{os.getpid()}")
    flags = (*FLAGS, *compiler_flags())
    command = [compiler, *flags, f"-I{jax.ffi.include_dir()}", f"-I{HEADERS}", str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise KernelsUnavailable(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[:500]}")
    unfinished.rename(library)  # at once, so that nobody loads half of it
