"""C++ kernels for the CPU: libraries that a wheel has, or that are compiled on this machine, registered with XLA.

XLA:CPU packs a weight again for each product of a few rows, and gathers pages before it reads
them: that is half the machine's speed. Our kernels do neither. setup.py compiles them for each
level of processors into a wheel. Where there is no such library, as in a clone, a C++ compiler
(``CXX``, or c++, g++ or clang++ on the PATH) makes it, once; without one, XLA's operations serve.
"""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

from caching.cache_directory import cache_home, check_owner, not_used
from caching.cores import usable_cores
from caching.instruction_set import compiler_flags, level

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-w")
HEADERS = Path(__file__).parent / "cpu"
ATTENTION = HEADERS / "attention.cc"
SHIPPED = HEADERS / "compiled"
"""The libraries of a wheel."""

UNFINISHED = "unfinished-"
"""How directories are called in which a compiler works, and which a process that was killed leaves."""
LONGEST_COMPILATION = 3600.0

_compilers = ThreadPoolExecutor(thread_name_prefix="kernel compiler")
_running: "set[subprocess.Popen[str]]" = set()


class KernelsUnavailable(Exception):
    """This machine cannot have our kernels; the text has the reason and the remedy."""


def load(source: Path) -> ctypes.CDLL:
    """The library of a source file. Raises KernelsUnavailable and UnknownInstructions."""
    return loading(source).result()


@cache
def loading(source: Path) -> "Future[ctypes.CDLL]":
    """``load`` in the background, without JAX, which takes a second to import."""
    return _compilers.submit(_load, source)


def _load(source: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(find(source) or compile_library(source, level(), _compiled_here())))
    if (use_cores := getattr(library, "odriver_use_cores", None)) is not None:  # it shares loops among threads
        use_cores(usable_cores())
    return library


def register(library: ctypes.CDLL, name: str) -> None:
    """Register the handler ``name`` of a library with XLA."""
    import jax

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def find(source: Path) -> Path | None:
    """A source file's library for this processor: a wheel's, or one that was compiled here before.

    Raises KernelsUnavailable and UnknownInstructions.
    """
    stem = _stem(source, level())
    for directory in (SHIPPED, _compiled_here()):
        if directory != SHIPPED:
            try:
                check_owner(directory)
            except PermissionError as error:
                raise KernelsUnavailable(not_used(directory, error)) from error
        for library in _fitting(directory, stem):
            try:
                _check_whole(library)
                ctypes.CDLL(str(library))
            except OSError as error:  # a wheel's may need a newer libc
                logger.warning("%s", error)
            else:
                return library
    return None


def _check_whole(library: Path) -> None:
    """Raises OSError for a library that was cut off: to load it would end the process, by SIGBUS.

    In ELF of 64 bits a linker writes the table of sections last, and the header says where.
    """
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return  # the loader says so
    (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<2H", header, 58)
    if library.stat().st_size < offset + size * count:
        raise OSError(f"{library} was cut off")


def compiler() -> str:
    """The C++ compiler of this machine. Raises KernelsUnavailable."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise KernelsUnavailable(f"no C++ compiler {asked or 'on the PATH'}: install g++ for about twice the speed")


def compile_library(source: Path, level: str, directory: Path) -> Path:
    """Write the library of a source file for a level of processors. Raises KernelsUnavailable."""
    headers, by = xla_headers(), compiler()
    library = directory / f"{_stem(source, level)}-ffi{'.'.join(map(str, ffi_version()))}.so"
    flags = (*FLAGS, *compiler_flags(level), f"-I{headers}", f"-I{HEADERS}")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_unfinished(directory)
        own = TemporaryDirectory(dir=directory, prefix=UNFINISHED)
    except OSError as error:
        raise _unwritable(directory, error) from error
    with own:
        unfinished = Path(own.name, library.name)
        command = [by, *flags, str(source), "-o", str(unfinished)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            _running.add(running)
            _, errors = running.communicate()
            _running.remove(running)
        if running.returncode:
            raise KernelsUnavailable(f"{by} cannot compile {source.name}: {errors.strip()[:500]}")
        try:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())  # its name is not on the disk before it is
            unfinished.rename(library)  # atomic: no process loads half of it
        except OSError as error:
            raise _unwritable(directory, error) from error
    return library


def _unwritable(directory: Path, error: OSError) -> KernelsUnavailable:
    return KernelsUnavailable(f"{directory} cannot be written ({error.strerror}): set XDG_CACHE_HOME")


def stop_compilers() -> None:
    """End them, and remove what they have begun: for a process that ends without waiting for its
    threads."""
    _compilers.shutdown(wait=False, cancel_futures=True)
    for running in tuple(_running):
        for process in _workers(running.pid):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGTERM)
    _compilers.shutdown()


def _workers(process: int) -> list[int]:
    """The programs that do the work of a compiler, without which it ends, too."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        children = []
    return [worker for child in children for worker in _workers(int(child))] or [process]


def _forget_unfinished(directory: Path) -> None:
    for left in directory.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its compiler has just ended
            if time.time() - left.stat().st_mtime > LONGEST_COMPILATION:
                shutil.rmtree(left, ignore_errors=True)


def xla_headers() -> Path:
    """``jax.ffi.include_dir()``, found without an import of JAX, and by a build that pip isolates from
    the environment too. Raises KernelsUnavailable."""
    jaxlib = PathFinder.find_spec("jaxlib", [*sys.path, sysconfig.get_path("platlib")])
    if jaxlib is None or jaxlib.origin is None:
        raise KernelsUnavailable("no jaxlib, whose headers our kernels need")
    return Path(jaxlib.origin).parent / "include"


def ffi_version() -> tuple[int, ...]:
    """The version of XLA's foreign function interface in jaxlib. Raises KernelsUnavailable."""
    header = (xla_headers() / "xla/ffi/api/c_api.h").read_text()
    version = re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)$", header, re.MULTILINE)
    if len(version) != 2:
        raise KernelsUnavailable("jaxlib's header has no version of XLA's foreign function interface")
    return tuple(map(int, version))


def _compiled_here() -> Path:
    return cache_home() / "kernels"


def _fitting(directory: Path, stem: str) -> Iterator[Path]:
    """Libraries with this stem that the installed jaxlib takes: it takes its own version of the
    interface, and those of the last 12 months at least, but no later one."""
    installed = ffi_version()
    try:
        libraries = list(directory.glob(f"{stem}-ffi*.so"))
    except PermissionError:  # another user's, whose HOME we have kept: compiling says so
        return
    for library in libraries:
        if tuple(map(int, library.stem.rpartition("-ffi")[2].split("."))) <= installed:
            yield library


def _stem(source: Path, level: str) -> str:
    """How a library's name begins: with a hash of what it is compiled from. Which compiler did it
    makes no difference, nor on which machine."""
    headers = sorted({*HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    digest = hashlib.sha256()
    flags = [flag.encode() for flag in (*FLAGS, *compiler_flags(level))]
    for part in (*(path.read_bytes() for path in (source, *headers)), *flags):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{source.stem}-{level}-{digest.hexdigest()[:16]}"
