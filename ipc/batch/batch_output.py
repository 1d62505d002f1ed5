"""The output of a batch: a line for each request, appended when done; a crash loses none."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ipc.errors import BatchError

SUCCESS = 200
ID_PREFIX = "batch_req_"
"""Of the ``id`` of a result, which is the first field of its line."""
_BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    """The fields of a line that say which request it answers and whether it succeeded."""

    custom_id: str
    response: _Response


class BatchOutput:
    """The open, locked output file, and its results so far: whether each request succeeded, by
    ``custom_id``.

    An incomplete result at the end is cut off. Raises BatchError for a file that is no batch's
    output, which it leaves as it is, is locked by another batch, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.results: dict[str, bool] = {}
        self._path = path
        self._unsynced = False
        with self._writing():
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise BatchError(f"{path} is no file: results are read again when a batch is continued")
            self._lock()
            with self._writing():
                self._read()
                _sync_directory(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def append(self, result: dict[str, Any]) -> None:
        """Append a line, whole or not at all. From now on it outlives this process, and after
        ``sync`` the machine."""
        line = msgspec.json.encode(result) + b"\n"
        with self._writing():
            end = os.fstat(self._descriptor).st_size
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # a full disk may take a part, and other results may be on their way
                os.ftruncate(self._descriptor, end)
                raise
        self._unsynced = True
        self.results[result["custom_id"]] = result["response"]["status_code"] == SUCCESS

    def sync(self) -> None:
        """Wait until the lines are on the disk; any thread."""
        if self._unsynced:
            self._unsynced = False
            with self._writing():
                os.fsync(self._descriptor)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchError(f"cannot write {self._path}: {error.strerror}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchError(f"another batch is writing {self._path}") from error

    def _read(self) -> None:
        end = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{self._path}, line {number}"
                if not line.endswith(b"\n"):
                    if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                        raise _no_result(where)
                    os.ftruncate(self._descriptor, end)
                    return
                end += len(line)
                self._know(line, where)

    def _know(self, line: bytes, where: str) -> None:
        try:
            result = msgspec.json.decode(line, type=_Result)
        except ValueError as error:
            raise _no_result(where) from error
        if result.custom_id in self.results:
            raise BatchError(f"{where} is a second result of {result.custom_id!r}: remove one of them")
        self.results[result.custom_id] = result.response.status_code == SUCCESS


def _no_result(where: str) -> BatchError:
    return BatchError(f"{where} is no result of a batch: choose another file, or remove the line")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
