"""C++ kernels for the CPU: compiled on this machine, cached on disk, registered with XLA.

XLA:CPU packs a weight again for each product of a few rows, and gathers pages before it reads
them: that is half the machine's speed. Our kernels do neither. They need a C++ compiler (``CXX``,
or c++, g++ or clang++ on the PATH); without one, XLA's own operations serve.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

from caching.instruction_set import compiler_flags, processor

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
HEADERS = Path(__file__).parent / "cpu"
ATTENTION = HEADERS / "attention.cc"

_compilers = ThreadPoolExecutor(thread_name_prefix="kernel compiler")


class KernelsUnavailable(Exception):
    """This machine cannot have our kernels; the text has the reason and the remedy."""


def cache_home() -> Path:
    """The directory of what is compiled, under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odriver"


def load(source: Path) -> ctypes.CDLL:
    """The library of a source file. Raises KernelsUnavailable and UnknownInstructions."""
    return loading(source).result()


@cache
def loading(source: Path) -> "Future[ctypes.CDLL]":
    """``load`` in the background, without JAX, which takes a second to import.

    The library is compiled unless a process on a machine like this one already did that.
    """
    return _compilers.submit(_load, source)


def _load(source: Path) -> ctypes.CDLL:
    compiler = _compiler()
    library = cache_home() / "kernels" / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    if not library.exists():
        _compile(compiler, source, library)
    return ctypes.CDLL(str(library))


def register(library: ctypes.CDLL, name: str) -> None:
    """Register the handler ``name`` of a library with XLA."""
    import jax

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise KernelsUnavailable(f"no C++ compiler {asked or 'on the PATH'}: install g++ for about twice the speed")


def _fingerprint(compiler: str, source: Path) -> str:
    """A hash of all that a library depends on: sources, compiler, flags, jaxlib, processor."""
    headers = sorted({*HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    parts = [source.read_bytes(), *(header.read_bytes() for header in headers)]
    texts = [*FLAGS, *compiler_flags(), compiler, version("jaxlib"), processor()]
    parts += [text.encode() for text in texts]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _xla_headers() -> Path:
    """``jax.ffi.include_dir()``, found without an import of JAX."""
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None and jaxlib.origin is not None
    return Path(jaxlib.origin).parent / "include"


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = library.with_suffix(f".{os.getpid()}")
    flags = (*FLAGS, *compiler_flags())
    command = [compiler, *flags, f"-I{_xla_headers()}", f"-I{HEADERS}", str(source), "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise KernelsUnavailable(f"{compiler} cannot compile {source.name}: {done.stderr.strip()[:500]}")
    unfinished.rename(library)  # atomic: no process loads half of it
