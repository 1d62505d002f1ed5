"""From what the operator calls a model to directories of this machine."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import json, to_builtins

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.hub.names import Place, directory_of, place_of, served_name
from engine.hub.small_files import NO_VOCABULARY, SMALL_FILES, TOKENIZER_FILES, vocabulary_file
from engine.models.family_names import check_family
from engine.models.generation_config import chosen_generation_config
from engine.models.heads.head_names import check_assistant, check_head
from engine.progress import Progress
from engine.speculation.speculative_config import EAGLE3, MTP, SpeculativeConfig

Report = Callable[[Progress], None]
HEADS: dict[str, Callable[[Path], None]] = {EAGLE3: check_head, MTP: check_assistant}
"""By method, what refuses a directory that has no such drafter."""


def obtained(config: EngineConfig, report: Report) -> EngineConfig:
    """The config with directories in place of names, and with the names that are served.

    Weights on the hub are downloaded; those in a bucket stay there. Raises ConfigurationError
    before that if the model cannot be served, and DownloadFailed.
    """
    model = config.model or str(config.directory)
    directory, weights_url = small_files(model, config.revision)
    check_family(directory)
    # A family that config.json names cuts the words of a file that doesn't say how.
    files = ("config.json", *TOKENIZER_FILES)
    tokenizer = None if config.tokenizer is None else small_files(config.tokenizer, None, files)[0]
    if vocabulary_file(tokenizer or directory) is None:
        raise ConfigurationError(f"{config.tokenizer or model} {NO_VOCABULARY}")
    chosen_generation_config(config.generation_config, directory)
    if config.chat_template is not None and not os.path.isfile(config.chat_template):
        raise ConfigurationError(f"there is no chat template {config.chat_template}, or this user may not see it")
    draft, config = config.speculation and config.speculation.model, with_draft_directory(config)
    if draft and place_of(draft) is Place.HUB and (of_draft := config.of_draft_model) is not None:
        method = config.speculation.method if config.speculation else ""
        _download_weights(draft, of_draft.directory, report, HEADS.get(method, _check_model))
    if place_of(model) is Place.HUB:
        _download_weights(model, directory, report, partial(_check_model, speculation=config.speculation))
    return replace(
        config,
        model=str(directory),
        weights_url=weights_url,
        revision=None,
        tokenizer=None if tokenizer is None else str(tokenizer),
        served_model_name=config.served_model_name or (served_name(model),),
    )


def with_draft_directory(config: EngineConfig, patterns: tuple[str, ...] = SMALL_FILES) -> EngineConfig:
    """With a directory of the draft model's small files in the place of its name, if there is one.

    Raises as ``small_files`` does, and ConfigurationError for a family that is not served, or what
    is no draft head or assistant where one is named.
    """
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return config
    try:
        directory, weights_url = small_files(speculation.model, patterns=patterns)
        HEADS.get(speculation.method, check_family)(directory)
    except ConfigurationError as error:  # which may be a DownloadFailed
        raise type(error)(f"speculative_config: model: {error}") from error
    given = to_builtins(speculation) | {"model": str(directory)}
    return replace(config, speculative_config=json.encode(given).decode(), draft_weights_url=weights_url)


def _download_weights(name: str, directory: Path, report: Report, check: Callable[[Path], str | None]) -> None:
    """Of a repository whose small files are in this directory, unless ``check`` refuses these. It may return the prefix
    of tensors that there must be."""
    from engine.hub.hugging_face import download_weights
    from engine.models.heads.mtp_layer import check_stored

    prefix = check(directory)
    check_index = None if prefix is None else partial(check_stored, directory, prefix)
    download_weights(name, directory, report, check_index)


def _check_model(directory: Path, speculation: SpeculativeConfig | None = None) -> str | None:
    """The prefix of the layer of the checkpoint that drafts, if one does. Raises ConfigurationError if the model cannot be
    served, or not with these drafts."""
    from engine.models.head_specs import MTPHeadSpec
    from engine.models.heads.read_mtp import read_mtp
    from engine.models.model_config import read_config_file

    model = read_config_file(directory / "config.json")
    if speculation is not None and speculation.method == MTP:
        name = speculation.model
        head = read_mtp(None if name is None else directory_of(name), model, str(name)).head
        return head.prefix if isinstance(head, MTPHeadSpec) else None
    return None


def small_files(
    name: str, revision: str | None = None, patterns: tuple[str, ...] = SMALL_FILES
) -> tuple[Path, str | None]:
    """A directory with a model's small files, and the URL of its weights if they are in a bucket.

    Raises ConfigurationError and DownloadFailed.
    """
    place = place_of(name)
    if revision is not None and place is not Place.HUB:
        raise ConfigurationError(
            f"revision is of a repository of the Hugging Face hub, and {name} is none: leave it out"
        )
    match place:
        case Place.DIRECTORY:
            return _newest(directory_of(name)), None
        case Place.BUCKET:
            from engine.hub.bucket import copy_small

            return copy_small(name), name.rstrip("/")
        case Place.HUB:
            from engine.hub.hugging_face import download_small

            return download_small(name, revision, patterns), None


def _newest(directory: Path) -> Path:
    """The newest checkpoint of a directory that EasyDeL trains in; any other directory itself."""
    if (directory / "config.json").is_file() or not any(directory.glob("*/metadata.json")):
        return directory
    from eformer.serialization.checkpointer import find_latest_checkpoint

    return Path(find_latest_checkpoint(str(directory)) or directory)
