"""Drafts through driver and engine: what a client gets is what it would get without them, but sooner."""

import dataclasses
import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fake_driver import PATIENCE
from test_resumption import Asker, assert_goes_on
from test_several_tokens import joined
from test_structured_outputs import Served, build_config, write_model

from driver.request import ReturnSample
from engine.build import build_engine

pytestmark = pytest.mark.thorough

SPECULATION = (
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 3, '
    '"prompt_lookup_history": 1000}'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, whose text goes round in loops."""
    return write_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Served]:
    """A driver of an engine without drafts."""
    yield from _served(model, None)


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[Served]:
    """The same with drafts, and as many as if steps cost nothing."""
    for served in _served(model, SPECULATION):
        served.engine._scheduler.speculation._seconds = lambda _tokens, _passes: None
        yield served


def _served(model: Path, speculation: str | None) -> Iterator[Served]:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "speculative_config": speculation}
    config = dataclasses.replace(build_config(model), **sizes)
    served = Served(model, build_engine(config, lambda progress: None))
    yield served
    served.driver.stop("the tests are over")
    served.engine.check_integrity()
    assert served.engine.stats().pages_owned == 0


def samples_of(channel: "queue.SimpleQueue[ReturnSample]") -> list[ReturnSample]:
    """All of a request."""
    samples = [channel.get(timeout=PATIENCE)]
    while not samples[-1].is_last:
        samples.append(channel.get(timeout=PATIENCE))
    return samples


def random_params(rng: Random) -> dict[str, Any]:
    """Of one request: ends by text, by tokens and by length, in the middle of what a step gives too."""
    return {
        "temperature": rng.choice([0, 0, 1]),
        "max_tokens": rng.randint(1, 60),
        "allowed_token_ids": rng.sample(range(60, 120), rng.choice([2, 3, 8])),
        "stop": [rng.choice("abcdefghijklmnop") * rng.choice([1, 2]) for _ in range(rng.choice([0, 0, 2]))],
        "include_stop_str_in_output": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 0, 1]),
        "stop_token_ids": [rng.randrange(60, 120)],
        "logprobs": rng.choice([None, 1]),
        "n": rng.choice([1, 1, 2]),
        "repetition_detection": rng.choice([None, None, {"max_pattern_size": 4, "min_count": 6}]),
        "num_speculative_tokens": rng.choice([None, None, 0, 2]),
    }


def told(samples: list[ReturnSample], params: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client has in the end, whose log-probabilities are rounded as the size of a step has it."""
    answer = joined(samples, params["n"])
    for one in answer[:-1]:
        one["logprobs"] = [
            {key: (round(at.logprob, 3), at.decoded_token) for key, at in token.items()} for token in one["logprobs"]
        ]
    return answer


def test_clients_are_given_the_same_with_drafts(plain: Served, ours: Served) -> None:
    """Texts, ids, log-probabilities, ends and usage of many at once; some of the samples have several tokens."""
    rng = Random(0)
    asked = [random_params(rng) for _ in range(16)]

    got = [[served.submit(**params) for params in asked] for served in (ours, plain)]
    mine, others = ([samples_of(channel) for channel in channels] for channels in got)

    for params, one, other in zip(asked, mine, others, strict=True):
        assert told(one, params) == told(other, params), params
    assert any(len(sample.token_ids) > 1 for samples in mine for sample in samples)
    status = ours.driver.status()
    assert 0 < status.num_accepted_tokens <= status.num_draft_tokens


def test_an_output_goes_on_with_drafts(ours: Served) -> None:
    """From anywhere, also from within what a step gave."""
    params = {"seed": 3, "max_tokens": 40, "temperature": 0, "n": 2, "logprobs": 1}

    assert_goes_on(Asker(ours.driver), "the fox", params, lambda count: list(range(0, count, 5)))


def test_what_is_aborted_in_the_midst_leaves_nothing(ours: Served) -> None:
    """Neither pages nor late tokens: its last sample is the last."""
    for count in range(1, 8):
        channel = ours.submit(max_tokens=100, ignore_eos=True)
        samples = [channel.get(timeout=PATIENCE) for _ in range(count)]
        ours.driver.abort(samples[0].request_id)
        while not samples[-1].is_last:
            samples.append(channel.get(timeout=PATIENCE))
        usage = samples[-1].usage
        assert samples[-1].finish_reason in ("abort", "length") and usage is not None
        assert usage.completion_tokens == sum(len(sample.token_ids) for sample in samples)
        assert ours.ask(max_tokens=1)[1] == "length" and channel.empty()


def test_a_tenant_has_drafts_of_its_own_earlier_texts_alone(ours: Served) -> None:
    """A drawn text, asked for again with the same seed, is mostly accepted drafts; with another salt it has as many as it had
    at first. In a form, too, where the host looks the drafts up."""
    for form in (None, {"regex": "[a-z ]{60}"}):
        accepted, texts = [], []
        for salt in ("a", "a", "b", "b"):
            before = ours.driver.status().num_accepted_tokens
            texts.append(ours.ask(form, temperature=1.0, seed=5, max_tokens=60, cache_salt=salt))
            accepted.append(ours.driver.status().num_accepted_tokens - before)

        assert len({text for text, _ in texts}) == 1
        first, again, others, others_again = accepted
        assert min(again, others_again) > 10 > max(first, others), accepted
    assert ours.driver.status().num_earlier_accepted_tokens > 10  # of the first form alone


@pytest.mark.parametrize("command", ["reset", "sleep", "sleep more deeply", "pause"])
def test_what_empties_the_prefix_cache_forgets_earlier_texts(ours: Served, command: str) -> None:
    """By whatever road an operator asks for it; the next request has them anew."""
    ask = partial(ours.ask, temperature=1.0, seed=5, max_tokens=30, cache_salt="forget")
    text, driver, done = ask(), ours.driver, queue.SimpleQueue[ReturnSample]()
    assert driver.status().earlier_tokens > 30

    match command:
        case "reset":
            driver.operations.reset_prefix_cache("1", done)
        case "sleep" | "sleep more deeply":
            driver.operations.sleep("1", done, level=1 if command == "sleep" else 2)
        case "pause":
            driver.operations.pause("1", done, "keep", clear_cache=True)
    assert done.get(timeout=PATIENCE).error is None
    status = driver.status()
    driver.operations.wake("2", done) if "sleep" in command else driver.operations.resume("2", done)

    assert (status.earlier_tokens, status.earlier_salts) == (0, 0)
    assert done.get(timeout=PATIENCE).error is None
    assert ask() == text and driver.status().earlier_salts == 1
