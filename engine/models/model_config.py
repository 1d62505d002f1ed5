"""Reads the JSON files of a model directory: its family, and the ModelSpec that this makes.

Families are found by listing a folder: each of its files defines ``FAMILY``.
"""

from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.family import SUPPORTED_VALUES, Family, UnsupportedError, require, require_one_of
from engine.models.spec import ModelSpec
from engine.models.weights.sources import read_json, weight_files
from engine.vocabulary import MAX_EOS_TOKEN_IDS

FAMILIES = Path(__file__).parent / "families"
"""The folder of the families that oDriver ships."""


class _Kind(msgspec.Struct):
    """The keys of ``config.json`` that identify the family."""

    model_type: str | None = None
    architectures: list[str] | None = None


class _Eos(msgspec.Struct):
    """The key that is read from both config.json and ``generation_config.json``."""

    eos_token_id: int | list[int] | None = None


@cache
def families_in(folder: Path) -> dict[str, Family]:
    """The families of a folder's files, by ``model_type``."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        where = spec_from_file_location(f"engine.models.families.{path.stem}", path)
        assert where is not None and where.loader is not None
        module = module_from_spec(where)
        where.loader.exec_module(module)
        found[module.FAMILY.model_type] = module.FAMILY
    return found


def read_model_config(directory: Path, families: Path = FAMILIES) -> ModelSpec:
    """The decoder of a Hugging Face directory, by one of the families in a folder.

    Raises ConfigurationError, with what to do, if the directory has no model or an unsupported
    one.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory: give the path of a downloaded model")
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} has no config.json: give the directory of a Hugging Face model")
    model = read_config_file(path, families)
    weight_files(directory)
    return model


def read_config_file(path: Path, families: Path = FAMILIES) -> ModelSpec:
    """The decoder of a ``config.json``, with or without weights. Raises ConfigurationError."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a config.json, or the directory of a Hugging Face model")
    given = read_json(path, dict[str, Any])
    try:
        family = _family(given, families_in(families))
        for key, supported in {**SUPPORTED_VALUES, **family.supported}.items():
            require_one_of(key, given.get(key, supported[0]), supported)
        filled = {**family.defaults, **given, **family.fixed}
        model = family.spec(msgspec.convert(filled, family.fields))
        eos = _eos_token_ids(path.parent, msgspec.convert(filled, _Eos))
        return replace(model, eos_token_ids=eos, tensors=tuple(family.tensors.items()))
    except (msgspec.ValidationError, UnsupportedError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _family(given: dict[str, Any], families: dict[str, Family]) -> Family:
    kind = msgspec.convert(given, _Kind)
    supported = ", ".join(f"{model_type} ({family.architecture})" for model_type, family in families.items())
    family = families.get(kind.model_type or "")
    if family is None:
        raise UnsupportedError(f"model_type {kind.model_type!r} is not supported; supported are {supported}")
    require(
        not kind.architectures or family.architecture in kind.architectures,
        f"architectures {kind.architectures} are not supported; supported are {supported}",
    )
    return family


def _eos_token_ids(directory: Path, config: _Eos) -> tuple[int, ...]:
    """Those of ``generation_config.json``, else of ``config.json``."""
    path = directory / "generation_config.json"
    generation = read_json(path, _Eos) if path.is_file() else _Eos()
    eos = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return ()
    ids = tuple(dict.fromkeys(eos if isinstance(eos, list) else [eos]))
    require(min(ids, default=0) >= 0, f"eos_token_id has {min(ids, default=0)}, which is no token")
    require(len(ids) <= MAX_EOS_TOKEN_IDS, f"eos_token_id has {len(ids)} ids, and {MAX_EOS_TOKEN_IDS} are most")
    return ids
