"""The tokenizer files of a model directory, of whatever kind, as those that transformers loads."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driver.text import sentencepiece_model
from driver.text.byte_pairs import is_tiktoken, read_tekken, read_tiktoken
from engine.errors import ConfigurationError
from engine.hub.small_files import NO_VOCABULARY, TOKENIZER, TOKENIZER_FILES, VOCABULARIES, vocabulary_file

CONFIG = "tokenizer_config.json"


@contextmanager
def loadable(directory: Path) -> Iterator[Path]:
    """A directory with a tokenizer.json: this one, or one for the while, where it is made.

    Raises ConfigurationError where there is no vocabulary, or none that can be read.
    """
    path = vocabulary_file(directory)
    if path is None:
        raise ConfigurationError(f"{directory} {NO_VOCABULARY}")
    if path.name in (TOKENIZER, "vocab.json"):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="odriver-tokenizer-") as made:
        try:
            _convert(path, Path(made))
        # what json, base64 and struct raise for files that are not what they are called
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            wrong = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else error
            raise ConfigurationError(f"the tokenizer file {path} cannot be read: {wrong}") from error
        yield Path(made)


def _convert(path: Path, made: Path) -> None:
    directory = path.parent
    for pattern in set(TOKENIZER_FILES) - set(VOCABULARIES):
        for file in directory.glob(pattern):
            (made / file.relative_to(directory)).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, made / file.relative_to(directory))
    definition, config = _definition(path, _json(directory / CONFIG))
    texts = _texts(config)
    for token in definition["added_tokens"]:
        token["special"] = token["special"] and token["id"] not in texts
    start = _text(config.get("bos_token") or "")
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    if start in ids and config.get("add_bos_token") is not False:
        definition["post_processor"] = _beginning_with(start, ids[start])
    (made / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    (made / TOKENIZER).write_text(json.dumps({"version": "1.0", **definition}), encoding="utf-8")


def _definition(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tokenizer.json, and the config with the special tokens that the vocabulary itself names."""
    if path.name == "tekken.json":
        return read_tekken(path), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        model_type = str(_json(path.parent / "config.json").get("model_type", ""))
        definition = read_tiktoken(path, model_type, {text: place for place, text in _listed(config).items()})
        return definition, _named(definition, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>") | config
    model = sentencepiece_model.parsed(path.read_bytes())
    names = (("bos_token", model.bos_id), ("eos_token", model.eos_id))
    special = {name: model.pieces[place].text for name, place in names if 0 <= place < len(model.pieces)}
    config = special | _with_older_files(path.parent, config, len(model.pieces))
    legacy = config.get("legacy") is not False
    return sentencepiece_model.as_tokenizer(model, _listed(config), legacy=legacy), config


def _with_older_files(directory: Path, config: dict[str, Any], size: int) -> dict[str, Any]:
    """A tokenizer_config.json with what added_tokens.json adds behind the pieces of a model, which counts where the
    config itself lists no tokens. Special are those that it or special_tokens_map.json names."""
    added = _json(directory / "added_tokens.json")
    if not added or "added_tokens_decoder" in config:
        return config
    names = _json(directory / "special_tokens_map.json")
    config = config | {
        name: [*map(_text, given)] if isinstance(given, list) else _text(given)
        for name, given in names.items()
        if given
    }
    named = {_text(given) for name, given in config.items() if name.endswith("_token") and given}
    named.update(map(_text, config.get("additional_special_tokens") or []))
    tokens = {
        str(place): {"content": text, "special": text in named, "normalized": False}
        for text, place in added.items()
        if place >= size
    }
    return config | {"added_tokens_decoder": tokens}


def _listed(config: dict[str, Any]) -> dict[int, str]:
    return {int(place): _text(token) for place, token in config.get("added_tokens_decoder", {}).items()}


def _texts(config: dict[str, Any]) -> set[int]:
    """The tokens that a tokenizer_config.json adds and calls text. transformers takes its other words of a token, and
    this one where it makes it special."""
    added = config.get("added_tokens_decoder", {}).items()
    return {int(place) for place, token in added if isinstance(token, dict) and token.get("special") is False}


def _named(definition: dict[str, Any], **names: str) -> dict[str, str]:
    return {name: token for name, token in names.items() if token in definition["model"]["vocab"]}


def _text(token: Any) -> str:
    """A token of tokenizer_config.json, which may be an object."""
    return str(token["content"] if isinstance(token, dict) else token)


def _beginning_with(token: str, token_id: int) -> dict[str, Any]:
    """The post-processor that puts this token before a text."""
    start = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _json(path: Path) -> dict[str, Any]:
    """A file's object; an empty one without the file. Raises ValueError."""
    if not path.is_file():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(given, dict):
        raise ValueError(f"{path.name} has no object in it")
    return given
