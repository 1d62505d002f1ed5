"""The directory of what was compiled or fetched once, and who may have put it there."""

import errno
import os
from pathlib import Path


def cache_home() -> Path:
    """The directory of what is compiled, under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odriver"


def check_owner(directory: Path) -> None:
    """Raises PermissionError for a directory of what is to be run that another user than root has made, or linked to:
    root's may be one in which anybody writes."""
    try:
        owners = {directory.lstat().st_uid, directory.stat().st_uid}
    except OSError:  # there is none, or whoever reads it says why not
        return
    for owner in owners - {os.geteuid(), 0}:
        raise PermissionError(errno.EPERM, f"it belongs to another user, {owner}, who could have this one run anything")
