"""What the soak asks for, and what has to come back."""

from random import Random
from typing import Any

import msgspec
import numpy as np

from scripts.benchmarks.endurance.random_requests import random_params

VOCABULARY = 2048
"""The shipped model's."""
CASES = 300
"""Different requests whose answers do not depend on chance, each of which is asked many times."""
OPENINGS = ("Once upon a time", "One day, a fox", "There once was", "In the morning", "What is 3 + 4?")
LONGEST_PROMPT, LONGEST_OUTPUT = 700, 256
GREEDY, ABORTED, HURRIED = 0.7, 0.2, 0.05
"""Shares of the requests: of those with an answer that is known, those aborted, and those with little time."""


class Ask(msgspec.Struct, kw_only=True):
    """One request."""

    prompt: str | list[int]
    params: dict[str, Any]
    stream: bool = True
    case: int | None = None
    """Which of the greedy ones it is."""
    abort_after: int | None = None
    """Pieces after which its client closes it, if it has not ended by then."""

    @property
    def sampling(self) -> dict[str, Any]:
        """``params`` as a client takes them, also after a way through JSON, whose keys are strings."""
        bias = self.params.get("logit_bias", {})
        return {**self.params, "logit_bias": {int(token): value for token, value in bias.items()}}


class Choice(msgspec.Struct):
    """One sample of an answer, as far as it came."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class Ending(msgspec.Struct):
    """How a request ended for its client."""

    choices: dict[int, Choice]
    aborted: bool = False
    error: str | None = None
    """The code of the daemon's error."""
    wrong: str | None = None
    """What no daemon may do: end twice, speak after its end, or go away without a reason."""

    @property
    def reason(self) -> str:
        """One word: of a first sample, of the client's own abort, or of an error."""
        return self.error or ("abort" if self.aborted else self.choices[0].finish_reason or "none")


def greedy_cases() -> list[Ask]:
    """CASES requests whose answers depend on nothing but the model."""
    random = Random(0)
    return [_greedy(random, case) for case in range(CASES)]


def random_asks(cases: list[Ask], count: int, seed: int) -> list[Ask]:
    """``count`` requests: greedy ones of ``cases``, and some of random parameters; some are to be aborted."""
    random, rng = Random(seed), np.random.default_rng(seed)
    asks = []
    for _ in range(count):
        if random.random() < GREEDY:
            ask = msgspec.structs.replace(random.choice(cases))
        else:
            ask = Ask(prompt=_prompt(random), params=random_params(rng))
        ask.params = {**ask.params, "priority": random.choice((0, 0, 0, 1, 20))}
        if random.random() < HURRIED:
            ask.params["timeout_s"] = random.uniform(0.01, 2.0)
        ask.stream = random.random() < 0.5
        if random.random() < ABORTED:
            ask.stream, ask.abort_after = True, random.randrange(8)
        asks.append(ask)
    return asks


def _greedy(random: Random, case: int) -> Ask:
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": random.randint(1, LONGEST_OUTPUT)}
    if random.random() < 0.2:
        params["stop"] = random.choice([" the", "a", ".", " was a"])
    if random.random() < 0.2:
        params["n"] = 2
    return Ask(prompt=_prompt(random), params=params, case=case)


def _prompt(random: Random) -> str | list[int]:
    """A text, or as often 1 to 26 tokens as 27 to 700; sometimes one that begins like others."""
    if random.random() < 0.4:
        return random.choice(OPENINGS) + random.choice(("", " a", " and", ", there", " in the"))
    length = int(LONGEST_PROMPT ** random.random())
    stem = Random(random.randrange(10)) if random.random() < 0.5 else random
    return [stem.randrange(1, VOCABULARY) for _ in range(length)]


def pages_of(ask: Ask, page_size: int) -> int:
    """Pages that it would fill if it ran to its end; a character of a text counts as a token."""
    per_sample: int = -(-(len(ask.prompt) + ask.params["max_tokens"]) // page_size)
    samples: int = ask.params.get("n", 1)
    return per_sample * samples
