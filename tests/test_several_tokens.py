"""Outputs of several tokens: whatever a step gives at once, the answer is that of one token at a time."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import EOS, FakeEngine, FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_resumption import Asker, assert_goes_on

from driver.odriver import oDriver
from driver.request import ReturnSample

COUNTS = (3, 1, 5, 2, 4)


class Parrot:
    """A driver with an engine whose outputs have as many tokens as one says."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.driver = oDriver(self.engine, FakeTokenizer())
        self.driver.start()
        self._asker = Asker(self.driver)

    def answer(self, counts: tuple[int, ...], prompt: list[int], params: dict[str, Any]) -> list[dict[str, Any]]:
        """Each sample as a whole; the last has the usage of all."""
        self.engine.counts = itertools.cycle(counts)  # it is idle
        return joined(self._asker.ask(prompt, params), params.get("n", 1))


def joined(samples: list[ReturnSample], number: int) -> list[dict[str, Any]]:
    """What a client has of each sample in the end."""
    found = []
    for index in range(number):
        parts = [sample for sample in samples if sample.index == index]
        *_, end = (part for part in parts if part.finish_reason is not None)
        found.append(
            {
                "text": "".join(part.text for part in parts),
                "token_ids": [token_id for part in parts for token_id in part.token_ids],
                "logprobs": [token for part in parts for token in part.logprobs],
                "ends": [part.finish_reason for part in parts if part.finish_reason is not None],
                "stop_reason": end.stop_reason,
                "weight_versions": end.weight_versions,
            }
        )
    assert samples[-1].usage is not None and samples[-1].error is None
    return [*found, {"tokens": (samples[-1].usage.prompt_tokens, samples[-1].usage.completion_tokens)}]


@pytest.fixture(scope="module")
def parrot() -> Iterator[Parrot]:
    """One for all examples."""
    parrot = Parrot()
    yield parrot
    parrot.driver.stop("the tests are over")


TOKENS = st.sampled_from([*b"abEND ", *"é😀".encode(), EOS])
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20)},
    optional={
        "n": st.just(2),
        "stop": st.lists(st.sampled_from(["END", "ab", "ND ", "é", "b", "aab"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.sampled_from(list(b"aD")), max_size=1),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 5),
        "repetition_detection": st.sampled_from(
            [{"max_pattern_size": 3, "min_count": 2}, {"max_pattern_size": 6, "min_pattern_size": 2, "min_count": 3}]
        ),
        "logprobs": st.just(1),
        "skip_special_tokens": st.booleans(),
    },
)


@given(
    st.lists(TOKENS, min_size=1, max_size=12), PARAMS, st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)
)
def test_the_answer_is_that_of_one_token_at_a_time(
    parrot: Parrot, prompt: list[int], params: dict[str, Any], counts: tuple[int, ...]
) -> None:
    """Texts, ids, ends, their reasons, log-probabilities and usage: with stop strings, repetition, stop ids and limits
    anywhere in an output."""
    params = {**params, "min_tokens": min(params.get("min_tokens", 0), params["max_tokens"])}

    assert parrot.answer(counts, prompt, params) == parrot.answer((1,), prompt, params)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("é😀x", {}),
        ("one END two", {"stop": ["END", "D t"], "n": 2, "logprobs": 1}),
        ("abcab", {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}}),
    ],
)
def test_it_goes_on_from_within_an_output(parrot: Parrot, prompt: str, params: dict[str, Any]) -> None:
    """What a client has may end between any two outputs, and those that follow are divided in another way."""
    parrot.engine.counts = itertools.cycle(COUNTS)

    assert_goes_on(Asker(parrot.driver), prompt, {"max_tokens": 17, **params}, lambda count: list(range(count)))


def test_a_repetition_before_the_limit_is_the_reason(parrot: Parrot) -> None:
    """Though the limit is reached by a later token of the same output."""
    params = {"max_tokens": 5, "repetition_detection": {"max_pattern_size": 2, "min_count": 2}}

    (answer, usage) = parrot.answer((5,), list(b"abxx"), params)

    assert (answer["text"], answer["ends"], usage["tokens"]) == ("abxx", ["repetition"], (4, 4))
