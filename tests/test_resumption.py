"""A request that goes on with what an earlier one gave: wherever that was cut off, the two are as one."""

import queue
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import EOS, FakeEngine, FakeTokenizer
from test_structured_outputs import Served, write_model

import driver.resumption
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample, Usage

SEED = 7


class Output:
    """One sample's, as far as it has come."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[Any] = []
        self.finish_reason: str | None = None

    def add(self, sample: ReturnSample) -> None:
        self.token_ids += sample.token_ids
        self.text += sample.text
        self.logprobs += [at.logprob for token in sample.logprobs for at in token.values()]
        self.prompt_logprobs += sample.prompt_logprobs
        self.finish_reason = self.finish_reason or sample.finish_reason


def num_tokens(usage: Usage | None) -> tuple[int, int]:
    """Of the prompt and of the output; what is in the cache, and how long it takes, depends on what came before."""
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens


class Asker:
    """Asks a driver, and takes down what comes."""

    def __init__(self, driver: oDriver) -> None:
        self._driver = driver
        self._count = 0

    def ask(self, prompt: Any, params: dict[str, Any], resume: list[list[int]] | None = None) -> list[ReturnSample]:
        """All samples of the answer."""
        self._count += 1
        channel: queue.SimpleQueue[ReturnSample] = queue.SimpleQueue()
        self._driver.submit_request(
            ActiveRequest(
                request_id=str(self._count),
                channel=channel,
                prompt=prompt,
                params=params,
                resume_token_ids=resume or [],
            )
        )
        samples = [channel.get(timeout=PATIENCE)]
        while not samples[-1].is_last:
            samples.append(channel.get(timeout=PATIENCE))
        return samples

    def refusal(self, resume: list[list[int]], **params: Any) -> str:
        """What a client is told that cannot go on so."""
        *_, last = self.ask("abc", {"max_tokens": 5, **params}, resume)
        assert last.error is not None and last.error.code == "invalid_request"
        return last.error.message


def outputs_of(samples: list[ReturnSample], number: int) -> list[Output]:
    """The outputs that these samples make."""
    outputs = [Output() for _ in range(number)]
    for sample in samples:
        assert sample.error is None
        outputs[sample.index].add(sample)
    return outputs


def assert_goes_on(asker: Asker, prompt: Any, params: dict[str, Any], cuts: Callable[[int], list[int]]) -> None:
    """Whatever of the answer is there when it is cut, the rest follows: no token, no character lost or twice."""
    number = params.get("n", 1)
    whole = asker.ask(prompt, params)
    expected = outputs_of(whole, number)
    for cut in cuts(len(whole)):
        outputs = outputs_of(whole[:cut], number)
        ended = [output.finish_reason for output in outputs]

        samples = asker.ask(prompt, params, [output.token_ids for output in outputs])
        for sample in samples:
            if ended[sample.index]:
                assert (sample.text, sample.token_ids) == ("", [])
            outputs[sample.index].add(sample)

        for output, one in zip(outputs, expected, strict=True):
            assert output.logprobs == pytest.approx(one.logprobs, abs=1e-4)  # a step of other rows rounds otherwise
            output.logprobs = one.logprobs
            assert vars(output) == vars(one), f"cut at {cut}"
        assert num_tokens(samples[-1].usage) == num_tokens(whole[-1].usage)


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    """Of a driver whose engine is a parrot, which reads long outputs in parts."""
    monkeypatch.setattr(driver.resumption, "READ_AT_ONCE", 3)
    parrot = oDriver(FakeEngine(), FakeTokenizer())
    parrot.start()
    yield Asker(parrot)
    parrot.stop("the test is over")


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("abc", {}),
        ("é😀x", {}),
        ([*b"one two", 0xC3], {}),
        ([*b"hi ho", EOS], {"max_tokens": 200}),
        ("one END two", {"stop": ["END", "D t"]}),
        ("one END two", {"stop": "END", "include_stop_str_in_output": True}),
        ("one END two", {"stop": "END", "min_tokens": 9, "max_tokens": 30}),
        ("abcab", {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}}),
        ("no text", {"detokenize": False, "stop_token_ids": [ord("x")]}),
        ("abc", {"n": 3}),
        ("one END two", {"n": 2, "stop": "END"}),
    ],
)
def test_it_goes_on_from_every_place(asker: Asker, prompt: Any, params: dict[str, Any]) -> None:
    """After each token: half a character, half a stop string and half a loop are known again."""
    assert_goes_on(asker, prompt, {"max_tokens": 17, **params}, lambda count: list(range(count)))


def test_samples_may_have_come_differently_far(asker: Asker) -> None:
    """One not begun, one in the middle and one that is whole."""
    outputs = outputs_of(asker.ask("abc", {"max_tokens": 4, "n": 3}, [[], [*b"ab"], [*b"abca"]]), 3)

    assert [output.text for output in outputs] == ["abca", "ca", ""]
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize(
    ("resume", "params", "words"),
    [
        ([[1], [2]], {}, "a list for each of the 1 samples"),
        ([[1]], {"n": 2}, "a list for each of the 2 samples"),
        ([[1] * 6], {}, "resume_token_ids[0] has 6 tokens, but max_tokens is 5"),
        ([[EOS, 1]], {}, "resume_token_ids[0] goes on behind a token that ends the output"),
        ([[1] * 8193] * 64, {"n": 64}, "resume_token_ids have 524352 tokens, and may have 524288"),
        ([[1, 999]], {}, "resume_token_ids[0][1] must be a token id from 0 to 256, not 999"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    asker: Asker, resume: list[list[int]], params: dict[str, Any], words: str
) -> None:
    """The message names it."""
    assert words in asker.refusal(resume, **params)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    """Of a driver and an engine of random weights, with the processes of grammars."""
    served = Served(write_model(tmp_path_factory.mktemp("model")))
    yield Asker(served.driver)
    served.driver.stop("the tests are over")


REGEX = {"structured_outputs": {"regex": "(fox|dog|cat)( and (fox|dog|cat)){2}"}}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"top_p": 0.9, "top_k": 40},
        {"n": 3, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1, "repetition_penalty": 1.3},
        {"min_tokens": 12, "bad_words": ["the", "fox"], "logit_bias": {5: 3.0}},
        {**REGEX},
        {"n": 2, **REGEX},
        {"ignore_eos": True, "structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
    ],
    ids=["greedy", "drawn", "logprobs of n", "penalties", "bias", "regex", "regex of n", "json"],
)
def test_the_model_draws_what_it_would_have_drawn(served: Asker, params: dict[str, Any]) -> None:
    """Penalties count the earlier output as output, a grammar knows where it is, draws go by place and seed."""

    def cuts(count: int) -> list[int]:
        return sorted({0, 1, count - 1, *Random(0).sample(range(count), min(count, 4))})

    assert_goes_on(served, "the fox", {"seed": SEED, "max_tokens": 24, **params}, cuts)


def test_an_output_that_its_grammar_does_not_allow_is_refused(served: Asker) -> None:
    """As the request's own error."""
    assert "structured_outputs" in served.refusal([[5]], **REGEX)
