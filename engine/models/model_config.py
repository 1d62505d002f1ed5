"""Reads the JSON files of a model directory: its family, and the ModelSpec that this makes.

Families are found by listing a folder: each of its files defines ``FAMILY``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.family import Family, Wrapper
from engine.models.family_names import FAMILIES, unsupported
from engine.models.generation_config import FILE as GENERATION_FILE
from engine.models.generation_config import ids_of, read_generation_config
from engine.models.requirements import UnsupportedError, require
from engine.models.spec import ModelSpec
from engine.models.weights.published.formats import KEYS, MODELOPT_FILE, published_format
from engine.models.weights.sources.checkpoint import config_file, read_json, stored_names
from engine.models.weights.sources.tensor_source import HEAD
from engine.request_limits import MOST_EOS_TOKEN_IDS

TIED = "tie_word_embeddings"
"""Beside a ``text_config`` it counts, not within. There the weights decide unless it is false: transformers 5 writes
its default, true, for a Mistral 3 with a head of its own."""

SHARED = ("dtype", "torch_dtype", *KEYS)
"""Keys that may be beside a ``text_config`` instead of within."""
EOS = "eos_token_id"
"""Beside a ``text_config`` it adds to those within: a chat's end is often there alone."""


class _Kind(msgspec.Struct):
    """The keys of ``config.json`` that identify the family."""

    model_type: str | None = None
    architectures: list[str] | None = None


class _Text(msgspec.Struct):
    """The keys of a Wrapper's ``config.json``."""

    text_config: dict[str, Any] | None = None


class _Eos(msgspec.Struct):
    """The key of ``config.json`` that generation_config.json may have, too."""

    eos_token_id: int | list[int] | None = None


@cache
def families_in(folder: Path) -> dict[str, Family | Wrapper]:
    """The families of a folder's files, by ``model_type``."""
    found: dict[str, Family | Wrapper] = {}
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
    path = config_file(directory)
    model = read_config_file(path, families)
    names = stored_names(directory) if model.unserved and _leaves_tying_open(read_json(path, dict[str, Any])) else None
    return model if names is None else replace(model, tied_embeddings=not any(name.endswith(HEAD) for name in names))


def _leaves_tying_open(given: dict[str, Any]) -> bool:
    """Whether the weights of a part of a model decide whether embedding and head are one table."""
    return TIED not in given or bool(given[TIED] and "text_config" in given)


def read_config_file(path: Path, families: Path = FAMILIES) -> ModelSpec:
    """The decoder of a ``config.json``, with or without weights. Raises ConfigurationError."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a config.json, or the directory of a Hugging Face model")
    given = read_json(path, dict[str, Any])
    try:
        wrapper, given = _unwrapped(given, families_in(families))
        family = _family(given, families_in(families))
        assert isinstance(family, Family)
        filled = family.filled(given)
        model = family.spec(msgspec.convert(filled, family.fields))
        eos = _eos_token_ids(path.parent, msgspec.convert(filled, _Eos))
        require(
            not (path.parent / MODELOPT_FILE).exists(),
            f"{MODELOPT_FILE} lies beside it: checkpoints that ModelOpt has quantised are not read; give the model that "
            "it was made from, which --quantization int8 serves in 8 bits",
        )
        unserved = (*model.unserved, *(wrapper.parts.items() if wrapper else ()))
        return replace(
            model,
            eos_token_ids=eos,
            tensors=(*family.tensors.items(), *model.tensors),
            unserved=unserved,
            published=published_format(given),
        )
    except (msgspec.ValidationError, UnsupportedError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _unwrapped(
    given: dict[str, Any], families: Mapping[str, Family | Wrapper]
) -> tuple[Wrapper | None, dict[str, Any]]:
    """The wrapper of a config.json, if it has one, and the keys of its text model."""
    wrapper = _family(given, families)
    if isinstance(wrapper, Family):
        return None, given
    text = msgspec.convert(given, _Text).text_config
    if text is None:
        require(wrapper.is_flat, "there is no text_config")
        text = {**given, "model_type": wrapper.text}
    text = {"model_type": wrapper.text, **text, "architectures": None}
    kind = text["model_type"]
    require(
        isinstance(families.get(kind), Family),
        f"text_config has model_type {kind!r}, which is not supported; supported are {', '.join(families)}",
    )
    outer = {key: given[key] for key in SHARED if text.get(key) is None and given.get(key) is not None}
    own = {TIED: given[TIED]} if TIED in given else {}
    if ids := [number for config in (text, given) for number in ids_of(msgspec.convert(config, _Eos).eos_token_id)]:
        own[EOS] = ids
    return wrapper, {**text, **outer, **own, **wrapper.fixed}


def _family(given: dict[str, Any], families: Mapping[str, Family | Wrapper]) -> Family | Wrapper:
    """By ``model_type`` and an architecture, in any case: published are ``ExaoneMoEForCausalLM`` and ``AXK1``."""
    kind = msgspec.convert(given, _Kind)
    family = families.get((kind.model_type or "").lower())
    if family is None:
        raise UnsupportedError(unsupported(kind.model_type, families))
    names = (family.architecture, *(family.aliases if isinstance(family, Family) else ()))
    require(
        not kind.architectures or not {*map(str.lower, names)}.isdisjoint(map(str.lower, kind.architectures)),
        f"architectures {kind.architectures} are not supported; supported are {family.architecture}",
    )
    return family


def _eos_token_ids(directory: Path, config: _Eos) -> tuple[int, ...]:
    """Those of ``generation_config.json`` and of ``config.json``."""
    generation = read_generation_config(directory).eos_token_ids
    ids = tuple(dict.fromkeys((*generation, *ids_of(config.eos_token_id))))
    eos = f"{EOS}, here and in {GENERATION_FILE}," if generation else EOS
    require(min(ids, default=0) >= 0, f"{eos} has {min(ids, default=0)}, which is no token")
    require(len(ids) <= MOST_EOS_TOKEN_IDS, f"{eos} has {len(ids)} ids, and {MOST_EOS_TOKEN_IDS} are most")
    return ids
