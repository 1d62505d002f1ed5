"""The supported families by name alone: a model of another is refused before JAX is imported."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from engine.errors import ConfigurationError
from engine.models.weights.sources.checkpoint import config_file, read_json

FAMILIES = Path(__file__).parent / "families"
"""The folder of the families that oDriver ships."""
_DECLARATION = re.compile(r'\b(?:Family|Wrapper)\(\s*"([^"]+)",\s*"([^"]+)"')


class _Kind(msgspec.Struct):
    model_type: str | None = None


@cache
def named_families() -> dict[str, str]:
    """The architecture of each ``model_type``, as the files of FAMILIES declare them."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FAMILIES.glob("[!_]*.py"))]
    return dict(pair for text in texts for pair in _DECLARATION.findall(text))


def check_family(directory: Path) -> None:
    """Raises ConfigurationError for a directory of no such family, or without a config.json."""
    path = config_file(directory)
    kind = read_json(path, _Kind)
    if (kind.model_type or "").lower() not in named_families():
        raise ConfigurationError(f"{path}: {unsupported(kind.model_type, named_families())}")


def unsupported(model_type: str | None, families: Iterable[str]) -> str:
    """Why no family serves a model, and which there are."""
    return f"model_type {model_type!r} is not supported; supported are {', '.join(families)}"
