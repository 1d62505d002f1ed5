"""Directories that operators open for what is loaded at run time: nothing else is read."""

import os
import stat
from pathlib import Path

from engine.errors import ConfigurationError
from engine.hub.names import BUCKET, bucket_parts, is_name
from engine.request_limits import MAX_PATH_LENGTH


class OutsideRoot(ValueError):
    """A path that may not be read. The message says why, and shows nothing that is outside."""


class Root:
    """A directory, or one in a bucket (``gs://BUCKET/DIRECTORY``), by whose name it is set.

    A path is relative to it, or absolute and below it, once links and ``..`` are followed. Raises
    ConfigurationError where there is no such directory; a bucket is not asked.

    Whoever may write below a local root is trusted: what is checked may change before it is read.
    """

    def __init__(self, root: str, setting: str) -> None:
        self._setting = setting
        self._bucket = root.startswith(BUCKET)
        if self._bucket:
            parts = bucket_parts(root)
            if parts is None:
                raise ConfigurationError(f"{setting}: {root} is no directory in a bucket: gs://BUCKET/DIRECTORY")
            self._root = BUCKET + "/".join(parts)
        else:
            self._root = os.path.realpath(root)
            if not os.path.isdir(self._root):
                raise ConfigurationError(f"{setting}: there is no directory {root}, or this user may not see it")

    def __str__(self) -> str:
        return self._root

    def find(self, path: str) -> str:
        """The directory of that path, to be read: absolute and without links, or a URL.

        Raises OutsideRoot.
        """
        if not path or len(path) > MAX_PATH_LENGTH or not path.isprintable():
            raise OutsideRoot(f"a path has 1 to {MAX_PATH_LENGTH} printable characters")
        return self._in_bucket(path) if self._bucket else self._in_directory(path)

    def _in_bucket(self, path: str) -> str:
        below = path.removeprefix(self._root + "/").rstrip("/")
        if not all(map(is_name, below.split("/"))):
            raise self._outside(path)
        return f"{self._root}/{below}"

    def _in_directory(self, path: str) -> str:
        found = os.path.realpath(Path(self._root, path))
        if not self._has(found):
            raise self._outside(path)
        try:
            with os.scandir(found) as entries:
                for entry in entries:
                    self._check_entry(path, entry)
        except OSError as error:
            raise OutsideRoot(f"{path} cannot be read: {error.strerror}") from error
        return found

    def _check_entry(self, path: str, entry: "os.DirEntry[str]") -> None:
        """A file may be a link to one below the root, and is no pipe, which could be read for
        ever."""
        if entry.is_symlink() and not self._has(os.path.realpath(entry.path)):
            raise self._outside(f"{path}/{entry.name}")
        if not Path(entry.path).exists():
            raise OutsideRoot(f"{path}/{entry.name} is a link to a file that is not there")
        mode = entry.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OutsideRoot(f"{path}/{entry.name} is no file")

    def _has(self, found: str) -> bool:
        return found.startswith(self._root.rstrip("/") + "/")

    def _outside(self, path: str) -> OutsideRoot:
        return OutsideRoot(f"{path} is not below {self._setting}, and nothing else is read")
