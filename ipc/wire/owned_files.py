"""Files in directories that may belong to another user, as a service's do when root makes its
keys.

The owner of a directory may at any moment replace a file in it by a symbolic link. So root walks
to a directory one component at a time, each opened relative to its parent's descriptor, and
follows only root's own links. A new file is given to the owner of its directory while it is open,
and has its name when it is written.
For any other user links are followed as usual.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LINKS = 40
"""Symbolic links in one path, as in Linux."""


@contextmanager
def opened_directory(path: Path, *, make: int | None = None) -> Iterator[int]:
    """A descriptor (O_PATH) of a directory. Raises OSError.

    Where it is missing it is made with the mode ``make``, if any, for its parent's owner, and so
    are its parents.
    """
    descriptor = _walk(path, make=make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def create(path: Path, text: str) -> None:
    """Create a file (0600) that belongs to its directory's owner, whole or not at all. Raises
    OSError, also if it exists."""
    with opened_directory(path.parent) as directory, _written(directory, path.name, text, 0o600, is_owners=True) as new:
        try:
            os.link(new, path.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                raise
            # A file system without hard links: the name is taken first.
            os.close(os.open(path.name, _NEW, 0o600, dir_fd=directory))
            os.replace(new, path.name, src_dir_fd=directory, dst_dir_fd=directory)


def replace(path: Path, text: str) -> None:
    """Write a file (0644), replacing what is there: a link itself, not its target. Raises
    OSError."""
    with opened_directory(path.parent, make=0o755) as directory, _written(directory, path.name, text, 0o644) as new:
        os.replace(new, path.name, src_dir_fd=directory, dst_dir_fd=directory)


@contextmanager
def _written(directory: int, name: str, text: str, mode: int, *, is_owners: bool = False) -> Iterator[str]:
    """The name of a file beside the one of that name, with this text. It is gone at the end."""
    new = f".{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(new, dir_fd=directory)
    descriptor = os.open(new, _NEW, mode, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if is_owners:
                _hand_over(descriptor, directory)
            os.fchmod(descriptor, mode)
            file.write(text)
            file.flush()
            os.fsync(descriptor)  # a full disk may show only now
        yield new
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=directory)


def read(path: Path, max_links: int = MAX_LINKS) -> tuple[bytes, os.stat_result]:
    """A file's content and its status. Raises OSError."""
    with opened_directory(path.parent) as directory:
        try:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | _nofollow(), dir_fd=directory)
        except OSError:
            target = _roots_link(directory, path.name)
            if target is None or not max_links:
                raise
            return read(path.parent / target, max_links - 1)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no file", str(path))
            return file.read(), found


def names(path: Path) -> list[str]:
    """The names in a directory, sorted; none where it does not exist. Raises OSError."""
    try:
        with opened_directory(path) as directory:
            readable = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            return sorted(os.listdir(readable))
        finally:
            os.close(readable)
    except FileNotFoundError:
        return []


def remove(path: Path) -> None:
    """Take a file away. Raises OSError."""
    with opened_directory(path.parent) as directory:
        os.unlink(path.name, dir_fd=directory)


def _nofollow() -> int:
    return os.O_NOFOLLOW if os.geteuid() == 0 else 0


def _walk(path: Path, *, make: int | None, max_links: int = MAX_LINKS) -> int:
    parts = Path(os.path.abspath(path)).parts
    descriptor = os.open("/", _DIRECTORY)
    for index, name in enumerate(parts[1:], start=1):
        parent = descriptor
        try:
            descriptor = _enter(parent, name, make=make)
        except OSError:
            target = _roots_link(parent, name)
            if target is None or not max_links:
                raise
            resolved = Path(*parts[:index], target, *parts[index + 1 :])
            return _walk(resolved, make=make, max_links=max_links - 1)
        finally:
            os.close(parent)
    return descriptor


def _enter(parent: int, name: str, *, make: int | None) -> int:
    try:
        return os.open(name, _DIRECTORY | _nofollow(), dir_fd=parent)
    except FileNotFoundError:
        if make is None:
            raise
    os.mkdir(name, 0o700, dir_fd=parent)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    _hand_over(made, parent)
    os.fchmod(made, make)
    return made


def _roots_link(parent: int, name: str) -> str | None:
    """The target of root's own link in a directory where only root can put one; else None."""
    try:
        found, directory = os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(parent)
        if stat.S_ISLNK(found.st_mode) and found.st_uid == directory.st_uid == 0:
            return os.readlink(name, dir_fd=parent)
    except OSError:
        pass
    return None


def _hand_over(descriptor: int, directory: int) -> None:
    """Gives a file that root makes in another user's directory to that user."""
    if os.geteuid() == 0:
        owner = os.fstat(directory)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
