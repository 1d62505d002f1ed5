"""build_engine: from a model directory to an engine that is ready, or words that say why not."""

import jax
import jax.numpy as jnp
import pytest
from checkpoints import build_checkpoint

from engine.backend import choose_backend
from engine.build import build_engine, describe
from engine.compilations import num_compilations
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model whose context is 64 tokens."""
    return build_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def private_compilation_cache(tmp_path_factory, monkeypatch):
    """Compiled steps are not left in the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", None)


def build_config(directory, **settings):
    """The smallest engine that has more than one of everything."""
    defaults = {"model": directory, "max_num_seqs": 2, "max_num_batched_tokens": 4, "page_size": 4}
    return EngineConfig(**(defaults | settings))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_ready_when_it_is_built(directory, dtype):
    """It reports its progress, counts from zero, and compiles nothing for requests of any kind."""
    reports = []

    engine = build_engine(build_config(directory, dtype=dtype), reports.append)

    assert {report.stage for report in reports} == {"loading weights", "compiling"}
    assert all(report.done == report.total for report in reports[-1:])
    assert engine.stats().steps == engine.stats().generated_tokens == 0
    for number, params in enumerate((SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5))):
        for prompt in (1, 3, 9):
            engine.add(Sequence(f"{number} {prompt}", [5] * prompt, params, frozenset(), 5, seed=number))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.compilations_after_ready, stats.generated_tokens, stats.pages_owned) == (0, 45, 0)


def test_bfloat16_weights_are_kept_as_stored_and_serve_as_float32(tmp_path):
    """Unless a dtype is asked for: the tokens are those of float32 weights, and people are told."""
    stored = build_checkpoint(tmp_path, "llama2_bfloat16")

    def tokens(**settings):
        engine = build_engine(build_config(stored, page_size=16, **settings), lambda progress: None)
        engine.add(Sequence("", [5, 6, 7], SamplingParams(temperature=1), frozenset(), 30, seed=3))
        return [token for _ in iter(lambda: engine.has_work, False) for out in engine.step() for token in out.token_ids]

    assert tokens() == tokens(dtype="float32")
    if choose_backend(16, 12).packs:
        assert describe(build_config(stored))["dtype"] == "float32, weights as stored in bfloat16"


def test_the_context_is_what_model_operator_and_pool_allow(directory):
    """max_model_len is the least of the model's, the operator's and what the pool holds."""

    def limit(**settings):
        return build_engine(build_config(directory, **settings), lambda progress: None).limits.max_model_len

    assert limit() == 64
    assert limit(max_model_len=20) == 20
    assert limit(num_pages=6) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 65}, "max_model_len 65 is more than the 64 positions"),
        ({"num_pages": 2}, "too few for one page for each of max_num_seqs 2"),
        ({"num_pages": 10**12}, "lower num_pages"),
        ({"num_pages": 6, "max_model_len": 21}, "the pool holds 20 tokens, which is less than max_model_len 21"),
        ({"max_model_len": 1}, "no room for a prompt and an answer: raise max_model_len"),
        ({"page_size": 1, "num_pages": 2, "max_num_seqs": 1}, "no room for a prompt and an answer"),
        ({"hbm_utilization": 1e-9}, "too few for one page"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(directory, settings, words):
    """Impossible sizes are a ConfigurationError that names the setting, before the first progress report."""
    reports = []

    with pytest.raises(ConfigurationError, match=words):
        build_engine(build_config(directory, **settings), reports.append)

    assert reports == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0), ("page_size", 0), ("max_model_len", 0), ("num_pages", 1), ("hbm_utilization", 1.5),
        ("dtype", "int3"), ("run_ahead", -1), ("max_num_batched_tokens", 1),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(directory, name, value):
    """EngineConfig refuses it with its name, the allowed range and the value given."""
    with pytest.raises(ConfigurationError, match=rf"{name} must be .*, not {value}"):
        build_config(directory, **{name: value})


def test_a_compilation_in_service_is_counted():
    """The counter moves when something new is compiled, so that a 0 means something."""
    before = num_compilations()

    jax.jit(lambda x: x * 3 + before)(jnp.arange(7))

    assert num_compilations() > before
