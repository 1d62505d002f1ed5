"""What a service reads: where it is, and whether the service's user may read it."""

import json
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.adapters.lora_modules import paths_by_name
from engine.config import EngineConfig
from engine.hub.names import BUCKET, Place, directory_of, place_of
from engine.speculation.speculative_config import parse_speculative_config
from ipc.commands.installation.systemd_units import STATE, USER_NAME
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.service.settings import SETTINGS
from ipc.wire.addresses import checked_address

MODELS = ("model", "tokenizer", "generation_config")
"""Settings that name a directory, where there is one, or something else."""
ROOTS = ("adapter_root", "weights_root")
"""Settings that name a directory, or one in a bucket."""
NO_DIRECTORIES = ("auto", "none")
"""Values of generation_config that name none."""
READ, ENTER = stat.S_IROTH, stat.S_IXOTH


class ServiceFiles(NamedTuple):
    """What a service reads, by absolute paths; secrets are for its user alone."""

    files: list[Path]
    secrets: list[Path]
    is_remote: bool
    """Whether it reads from the network, too."""


def with_absolute_paths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, those that name files of this machine from its root on.

    Links are kept, so that a certificate may be renewed behind its name. Raises ConfigurationError and
    AddressError.
    """
    made = dict(given)
    for name, value in given.items():
        if SETTINGS[name].type is Path:
            made[name] = Path(os.path.abspath(value))
        elif (name in MODELS and _is_directory(value)) or (name in ROOTS and not value.startswith(BUCKET)):
            made[name] = os.path.abspath(value)
        elif name == "lora_modules":
            made[name] = [_absolute_module(module) for module in value]
        elif name == "speculative_config":
            made[name] = _absolute_model(value)
        elif name == "bind" and value.startswith("ipc://"):
            made[name] = checked_address(value, has_key=True)
    return made


def files_of(engine: EngineConfig, daemon: DaemonConfig, http: HttpConfig) -> ServiceFiles:
    """What a service with these settings reads. Raises ConfigurationError for a model that is
    nowhere."""
    draft = None if engine.speculation is None else engine.speculation.model
    models = [name for name in (engine.model, engine.tokenizer, draft) if name is not None]
    places = {name: place_of(name) for name in models}
    roots = [name for name in (engine.adapter_root, daemon.weights_root) if name is not None]
    roots += engine.lora_paths.values()
    found = [directory_of(name) for name, place in places.items() if place is Place.DIRECTORY]
    found += [Path(name) for name in roots if not name.startswith(BUCKET)]
    is_remote = len(found) < len(places) + len(roots)
    if engine.generation_config not in NO_DIRECTORIES:
        found.append(Path(engine.generation_config))
    found += [path for path in (engine.chat_template, http.ssl_certfile) if path is not None]
    secrets = [path for path in (http.ssl_keyfile, http.api_keys) if path is not None]
    # What is not there, or is the service's own, it makes itself.
    if daemon.keys is not None and not daemon.keys.is_relative_to(STATE) and daemon.keys.exists():
        secrets.append(daemon.keys)
    return ServiceFiles([Path("/", path) for path in found], [Path("/", path) for path in secrets], is_remote)


def unreadable(path: Path, *, is_secret: bool = False) -> str | None:
    """Why the service's user cannot read a file, or a directory and the files in it; None if it
    can."""
    try:
        if path.is_relative_to(STATE):
            return None
        if not path.exists():
            return f"there is no {path}"
        if (obstacle := not_entered(path)) is not None:
            return obstacle
        wanted = READ | ENTER if path.is_dir() else READ
        if not _may(path, wanted):
            modes = "r" if wanted == READ else "rx"
            advice = f"chown {USER_NAME} it, once that user is there" if is_secret else f"chmod o+{modes} it"
            return f"the service cannot read {path}: {advice}"
        inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    except OSError as error:
        return f"cannot look at {error.filename}: {error.strerror}"
    obstacles = (unreadable(file, is_secret=is_secret) for file in inside)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def not_entered(path: Path) -> str | None:
    """Why the service's user cannot come as far as to a path, or where its links lead; None if it
    can. Raises OSError."""
    directories = [directory for way in (path, path.resolve()) for directory in reversed(way.parents)]
    if path.is_dir():
        directories.append(path)
    for directory in dict.fromkeys(directories):
        if not _may(directory, ENTER):
            return f"the service cannot enter {directory}: chmod o+x it, or move {path}"
    return None


def _may(path: Path, wanted: int) -> bool:
    """Whether the service's user has these rights, which are those of others."""
    about = path.stat()
    mode = stat.S_IMODE(about.st_mode)
    try:
        user = pwd.getpwnam(USER_NAME)
    except KeyError:  # systemd makes it
        return mode & wanted == wanted
    if about.st_uid == user.pw_uid:
        mode >>= 6
    elif about.st_gid in os.getgrouplist(user.pw_name, user.pw_gid):
        mode >>= 3
    return mode & wanted == wanted


def _is_directory(name: str) -> bool:
    return name not in NO_DIRECTORIES and Path(name).is_dir()


def _absolute_module(module: str) -> str:
    """One of ``lora_modules``, with an absolute path."""
    ((name, path),) = paths_by_name([module]).items()
    if path.startswith(BUCKET):
        return module
    made = os.path.abspath(path)
    return json.dumps({"name": name, "path": made}) if module.lstrip().startswith("{") else f"{name}={made}"


def _absolute_model(speculative_config: str) -> str:
    """A ``speculative_config`` whose draft model, if it is a directory, has an absolute path."""
    model = parse_speculative_config(speculative_config).model
    if model is None or not Path(model).is_dir():
        return speculative_config
    return json.dumps(json.loads(speculative_config) | {"model": os.path.abspath(model)})
