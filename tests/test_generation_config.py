"""What a model's makers recommend, as defaults of requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigurationError
from engine.models.generation_config import FILE, GenerationConfig, chosen_generation_config


def write(directory: Path, **keys: Any) -> Path:
    """A directory with such a file."""
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(json.dumps(keys))
    return directory


def test_its_keys_are_sampling_params(tmp_path: Path) -> None:
    """Those that vLLM takes, by our names: whether to sample at all and the length with the prompt are not among them."""
    keys = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    write(tmp_path, **keys, max_new_tokens=64, max_length=20, do_sample=False, eos_token_id=[2, 3], pad_token_id=None)

    chosen = chosen_generation_config("auto", tmp_path)

    assert chosen.sampling_params == {**keys, "max_tokens": 64}
    assert chosen.eos_token_ids == (2, 3)


def test_the_operator_may_take_none_or_anothers(tmp_path: Path) -> None:
    """A model need not have the file; where a directory is named it has to."""
    own, other = write(tmp_path / "own", temperature=0.6, top_k=None), write(tmp_path / "other", top_p=0.5)

    assert chosen_generation_config("auto", own).sampling_params == {"temperature": 0.6}
    assert chosen_generation_config("auto", tmp_path) == GenerationConfig()
    assert chosen_generation_config("none", own).sampling_params == {}
    assert chosen_generation_config(str(other), own).sampling_params == {"top_p": 0.5}
    with pytest.raises(ConfigurationError, match=r"must be auto, none, or a directory with a generation_config\.json"):
        chosen_generation_config("vllm", own)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"temperature": -1}, "temperature must be from 0 to 100, not -1.0: put it right"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
        ({"top_k": "many"}, "Expected `int"),
        ({"eos_token_id": [2, -1]}, "eos_token_id has -1, which is no token"),
    ],
)
def test_values_that_no_request_could_have_are_refused(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    """At the start, and not at each request."""
    with pytest.raises(ConfigurationError, match=rf"generation_config\.json: {reason}"):
        chosen_generation_config("auto", write(tmp_path, **keys))
