"""Executables that an earlier start has compiled, which need neither tracing nor compilation.

JAX's own cache on disk is found by a program's text, which takes tracing, most of a later start.
These are found by what the text is made from (identity.py).
"""

import hashlib
import logging
import os
import pickle
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import jax
from jax import Device
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled

from caching.cache_directory import check_owner

logger = logging.getLogger(__name__)

PREFIX = "executables-"
"""How the names of directories begin."""
KEPT = 8
"""Identities whose executables stay on disk, those used last."""
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Stored:
    """An executable, and what it takes besides weights and pages."""

    compiled: Compiled
    scratch_bytes: int


class StoredExecutables:
    """A directory of one identity's executables. Any thread may read and write.

    Files are pickles, which run what they say: a directory that another user than root has made is not used.
    """

    def __init__(self, directory: Path, devices: tuple[Device, ...]) -> None:
        """``devices`` are those that they were compiled for, and run on. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_owner(directory)
        os.utime(directory)
        self._directory, self._devices = directory, devices
        self._first_failure = Lock()
        """Held from the first executable on that could not be written."""
        _forget_old(directory.parent)

    @property
    def identity(self) -> str:
        """What its directory is named by."""
        return self._directory.name.removeprefix(PREFIX)

    def read(self, program: str, size: int) -> Stored | None:
        """The executable of a program for so many tokens or rows; None if there is none that is
        whole and may be read."""
        path = self._path(program, size)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s): %s is compiled again", path, error.strerror, program)
            return None
        digest, payload = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(payload).digest() != digest:
            logger.warning("%s is damaged: %s is compiled again", path, program)
            return None
        executable, ins, outs, scratch = pickle.loads(payload)
        try:
            compiled = deserialize_and_load(executable, ins, outs, self._devices[0].client, self._devices)
        except jax.errors.JaxRuntimeError as refusal:
            logger.warning("%s is not accepted (%s): %s is compiled again", path, refusal, program)
            return None
        return Stored(compiled, scratch)

    def write(self, program: str, size: int, stored: Stored) -> None:
        """Keep an executable that was compiled by this process, if its kind can be kept and the disk
        has room.

        XLA:CPU would write one that it has read from a disk without its functions.
        """
        try:
            executable, ins, outs = serialize(stored.compiled)
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as refusal:
            logger.debug("%s of %d cannot be kept: %s", program, size, refusal)
            return
        payload = pickle.dumps((executable, ins, outs, stored.scratch_bytes))
        path = self._path(program, size)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(hashlib.sha256(payload).digest() + payload)
            unfinished.rename(path)  # atomic: nobody reads half of it
        except OSError as error:
            level = logging.WARNING if self._first_failure.acquire(blocking=False) else logging.DEBUG
            logger.log(level, "%s of %d cannot be kept on disk, and nor may others: %s", program, size, error)
            with suppress(OSError):  # it may never have been there
                unfinished.unlink()

    def _path(self, program: str, size: int) -> Path:
        return self._directory / f"{program.replace(' ', '-')}-{size}"


def _forget_old(home: Path) -> None:
    """Delete all but the directories that were used last. A daemon that starts with one that is
    deleted meanwhile compiles again."""
    used_at: dict[Path, float] = {}
    for path in home.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another start deletes, too
            used_at[path] = path.stat().st_mtime
    for path in sorted(used_at, key=used_at.__getitem__)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
