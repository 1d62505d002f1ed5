"""The setting that turns speculation on."""

import json

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigurationError


@pytest.mark.parametrize(
    ("sizes", "smallest", "largest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": None, "prompt_lookup_min": None}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, 1, 4),
    ],
)
def test_sizes_of_ngrams_are_vllms(sizes: dict[str, int | None], smallest: int, largest: int) -> None:
    """One of them that is left out is the other, and without both they are 5."""
    given = json.dumps({"method": "ngram", "num_speculative_tokens": 3, **sizes})

    speculation = EngineConfig(speculative_config=given).speculation

    assert speculation is not None and speculation.num_speculative_tokens == 3
    assert speculation.lookup_sizes == (smallest, largest)
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == (smallest, largest)


def test_a_draft_model_has_settings_of_its_own() -> None:
    """Those of the daemon, but for what is about its model alone."""
    given = '{"method": "draft_model", "num_speculative_tokens": 3, "model": "small"}'

    config = EngineConfig(model="large", quantization="int4", enable_lora=True, num_pages=9, speculative_config=given)

    assert config.of_draft_model == EngineConfig(model="small", generation_config="none", num_pages=9)
    assert EngineConfig().of_draft_model is None


def test_a_layer_of_the_checkpoint_has_the_settings_of_its_model() -> None:
    """Its weights are where the model's are."""
    given, url = '{"method": "mtp", "num_speculative_tokens": 1}', "gs://bucket/large"

    config = EngineConfig(model="large", weights_url=url, quantization="int4", speculative_config=given)

    assert config.of_draft_model == EngineConfig(model="large", weights_url=url, generation_config="none")


def test_an_assistant_has_weights_of_its_own() -> None:
    """Where the setting says."""
    given, url = '{"method": "mtp", "num_speculative_tokens": 1, "model": "small"}', "gs://bucket/small"

    config = EngineConfig(model="large", draft_weights_url=url, speculative_config=given)

    assert config.of_draft_model == EngineConfig(model="small", weights_url=url, generation_config="none")


def test_without_the_setting_nothing_is_drafted() -> None:
    """The default is no speculation."""
    assert EngineConfig().speculation is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ('{"method": "ngram"}', "`num_speculative_tokens`"),
        ('{"num_speculative_tokens": 3}', "method must be ngram, draft_model, eagle3, mtp, not None"),
        (
            '{"method": "eagle", "num_speculative_tokens": 3}',
            "method must be ngram, draft_model, eagle3, mtp, not 'eagle'",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be from 1 to 32, not 0"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens must be from 1 to 32, not 33"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "`$.num_speculative_tokens`"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 33}',
            "prompt_lookup_max must be from 1 to 32, not 33",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
            "prompt_lookup_min must be from 1 to prompt_lookup_max (2), not 3",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 0}',
            "prompt_lookup_min must be from 1 to prompt_lookup_max (2), not 0",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "model": "m"}',
            "model must be left out beside the method ngram, not 'm'",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_history": 65537}',
            "prompt_lookup_history must be from 1 to 65,536, not 65537",
        ),
        (
            '{"method": "mtp", "num_speculative_tokens": 3, "prompt_lookup_history": 9}',
            "prompt_lookup_history must be left out beside the method mtp, not 9",
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "model must be the draft model's name or directory"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "model must be the draft head's name or directory"),
        (
            '{"method": "mtp", "num_speculative_tokens": 3, "model": ""}',
            "model must be an assistant's name or directory, not ''",
        ),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": "m", "prompt_lookup_min": 2}',
            "prompt_lookup_min must be left out beside the method draft_model, not 2",
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 3, "model": "m", "models": "m"}', "`models`"),
        ("[]", "`object`"),
        ("ngram", "speculative_config must be JSON, such as {"),
        (
            '{"method": "\udcff"}',
            "speculative_config must be JSON, such as {",
        ),  # how Python has a byte that is no UTF-8
    ],
)
def test_a_wrong_key_is_named(given: str, complaint: str) -> None:
    """A key that is missing, unknown, of a wrong type or out of range is said, and so is what is no JSON."""
    with pytest.raises(ConfigurationError) as refusal:
        EngineConfig(speculative_config=given)

    assert str(refusal.value).startswith("speculative_config") and complaint in str(refusal.value)


def test_texts_are_not_kept_where_prefixes_are_not_shared() -> None:
    """They would be nobody's; without them there are n-grams all the same."""
    config = '{"method": "ngram", "num_speculative_tokens": 3%s}'

    with pytest.raises(ConfigurationError, match=r"prompt_lookup_history keeps texts .* set enable_prefix_caching"):
        EngineConfig(speculative_config=config % ', "prompt_lookup_history": 9', enable_prefix_caching=False)
    assert EngineConfig(speculative_config=config % "", enable_prefix_caching=False).speculation is not None
