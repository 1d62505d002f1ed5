"""The directory of what was compiled or fetched once, and who may have put it there."""

import errno
import os
import stat
from pathlib import Path


def cache_home() -> Path:
    """The directory of what is compiled, under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odriver"


def check_owner(directory: Path) -> None:
    """Raises PermissionError for a directory of what is to be run into which others may put it: one that another user
    than root has made, or linked to, or in which every user may write."""
    try:
        link, found = directory.lstat(), directory.stat()
    except OSError:  # there is none, or whoever reads it says why not
        return
    for owner in {link.st_uid, found.st_uid} - {os.geteuid(), 0}:
        raise PermissionError(errno.EPERM, f"it belongs to another user, {owner}, who could have this one run anything")
    if found.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "every user may write in it, and could have this one run anything")


def not_used(directory: Path, error: PermissionError) -> str:
    """What is said of a directory that ``check_owner`` refuses."""
    return f"{directory} is not used ({error.strerror}): set XDG_CACHE_HOME"
