"""What MODEL may name: a directory, a repository of the hub, a directory in a bucket."""

import os
import re
from enum import Enum, auto
from pathlib import Path

from engine.errors import ConfigurationError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OLLAMA = re.compile(r"(?:[\w.-]+/)*[\w.-]+:[\w.-]+")
BUCKET = "gs://"
EXAMPLE = "Qwen/Qwen3-0.6B"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo"
"""The small model that oDriver ships. It is the default."""
DEMO_DRAFT_MODEL = DEMO_MODEL.with_name("demo_draft")
"""A smaller one, which drafts for it."""


class Place(Enum):
    """Where a model is."""

    DIRECTORY = auto()
    HUB = auto()
    BUCKET = auto()


def directory_of(model: str | None) -> Path:
    """The directory of a model that has one; ``demo`` and ``demo_draft`` are ours where no other
    directory is called so."""
    if model is None:
        return DEMO_MODEL
    ours = {shipped.name: shipped for shipped in (DEMO_MODEL, DEMO_DRAFT_MODEL)}
    return Path(model) if os.path.isdir(model) else ours.get(model, Path(model))


def place_of(name: str) -> Place:
    """An existing directory comes first. Raises ConfigurationError for a name that can be none, and for a directory
    that may not be read."""
    directory = directory_of(name)
    if os.path.isdir(directory):  # unlike Path's, False too for a name that is too long, or where none may look
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            raise ConfigurationError(f"{name} is a directory that this user may not read: give it the right to")
        return Place.DIRECTORY
    if name.lower().endswith("gguf"):
        raise ConfigurationError(
            f"{name}: GGUF files are not read: give the repository or directory of the same model in safetensors, "
            f"such as {EXAMPLE}"
        )
    if name.startswith(BUCKET):
        return Place.BUCKET
    if _REPOSITORY.fullmatch(name):
        return Place.HUB
    if "://" in name:
        raise ConfigurationError(f"{name}: models are read from directories, from gs:// and from the Hugging Face hub")
    if _OLLAMA.fullmatch(name):
        raise ConfigurationError(
            f"{name} is a name of Ollama's: give the model's on the Hugging Face hub, such as {EXAMPLE}"
        )
    raise ConfigurationError(
        f"{name} is not a directory, or not one that this user may see: give that of a downloaded model, a name of the "
        f"Hugging Face hub such as {EXAMPLE}, or gs://BUCKET/DIRECTORY"
    )


def bucket_parts(url: str) -> list[str] | None:
    """The names of a bucket and of each directory down to one in it; None if the URL is of none."""
    parts = url.removeprefix(BUCKET).strip("/").split("/")
    return parts if all(map(is_name, parts)) else None


def is_name(part: str) -> bool:
    """Whether a part of a path is a name, and not one of those that lead elsewhere."""
    return part not in ("", ".", "..")


def served_name(name: str) -> str:
    """What requests call a model: a repository's name, also for its directory in the cache."""
    if not os.path.isdir(name):
        return name if place_of(name) is Place.HUB else name.rstrip("/").rpartition("/")[2]
    directory = Path(name).resolve()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.name
