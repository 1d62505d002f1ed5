"""``generation_config.json``: how the makers of a model want its tokens to be drawn."""

import os
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.weights.sources.checkpoint import read_json
from engine.sampling_params import SamplingParams

FILE = "generation_config.json"
_SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys that SamplingParams has under the same name and in the same meaning."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The keys that vLLM uses. As there, ``do_sample`` and ``max_length`` have no effect."""

    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output."""
        return ids_of(self.eos_token_id)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """What it says, by the names of SamplingParams; ``max_new_tokens`` is ``max_tokens``."""
        said = {name: getattr(self, name) for name in _SHARED} | {"max_tokens": self.max_new_tokens}
        return {name: value for name, value in said.items() if value is not None}


def ids_of(eos_token_id: int | list[int] | None) -> tuple[int, ...]:
    """The ids of an ``eos_token_id``, each once."""
    if eos_token_id is None:
        return ()
    return tuple(dict.fromkeys(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]))


def read_generation_config(directory: Path) -> GenerationConfig:
    """Of a model directory; empty if it has none. Raises ConfigurationError for a wrong one."""
    path = directory / FILE
    return read_json(path, GenerationConfig) if path.is_file() else GenerationConfig()


def chosen_generation_config(choice: str, directory: Path) -> GenerationConfig:
    """By ``--generation-config``: the model's own (auto), an empty one (none), or another's.

    Raises ConfigurationError if there is none in another directory, or for an impossible value.
    """
    if choice == "none":
        return GenerationConfig()
    if choice != "auto":
        directory = Path(choice)
        if not os.path.isfile(directory / FILE):
            raise ConfigurationError(
                f"generation_config must be auto, none, or a directory with a {FILE}, which {choice} is not, or not "
                "one that this user may see"
            )
    chosen = read_generation_config(directory)
    if min(chosen.eos_token_ids, default=0) < 0:
        raise ConfigurationError(f"{directory / FILE}: eos_token_id has {min(chosen.eos_token_ids)}, which is no token")
    try:
        msgspec.convert(chosen.sampling_params, SamplingParams)
    except msgspec.ValidationError as error:
        remedy = "put it right, or leave the file out with --generation-config none"
        raise ConfigurationError(f"{directory / FILE}: {error}: {remedy}") from error
    return chosen
