"""Requests of random lengths and parameters, many at once: whatever is asked for, nothing may be compiled for it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ipc.client import Client
from ipc.errors import OdriverError
from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.peers.systems import Ours

REQUESTS, AT_ONCE = 2000, 64
LONGEST_PROMPT, LONGEST_OUTPUT = 1000, 48

FORMS: list[dict[str, Any] | None] = [
    {"regex": "[a-z ]{1,30}"},
    {"choice": ["red", "green", "blue"]},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 5}},
    {"grammar": 'start: "x" start | "y"'},
]
FORMLESS = 16
"""For each that asks for one of the forms, requests that ask for none: each grammar is a process."""

PARAMETERS: dict[str, Callable[[np.random.Generator], Any]] = {
    "n": lambda rng: int(rng.choice([1, 1, 1, 2])),
    "max_tokens": lambda rng: int(rng.integers(4, LONGEST_OUTPUT, endpoint=True)),
    "min_tokens": lambda rng: int(rng.integers(4, endpoint=True)),
    "temperature": lambda rng: float(rng.choice([0.0, 0.5, 1.0, 2.0])),
    "top_k": lambda rng: int(rng.choice([-1, 0, 1, 40, 200])),
    "top_p": lambda rng: float(rng.uniform(0.1, 1.0)),
    "min_p": lambda rng: float(rng.uniform(0.0, 0.5)),
    "presence_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "frequency_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "repetition_penalty": lambda rng: float(rng.uniform(0.5, 2)),
    "logit_bias": lambda rng: {int(token): float(rng.uniform(-5, 5)) for token in rng.integers(100, size=3)},
    "allowed_token_ids": lambda rng: sorted({int(token) for token in rng.integers(200, 500, size=50)}),
    "bad_words": lambda rng: [" the", str(rng.integers(10))],
    "seed": lambda rng: int(rng.integers(2**32)),
    "stop": lambda rng: [str(rng.integers(10)), " the"],
    "stop_token_ids": lambda rng: rng.integers(100, size=3).tolist(),
    "include_stop_str_in_output": lambda rng: bool(rng.integers(2)),
    "ignore_eos": lambda rng: bool(rng.integers(2)),
    "repetition_detection": lambda rng: {"max_pattern_size": int(rng.integers(1, 9)), "min_count": 4},
    "num_speculative_tokens": lambda rng: int(rng.choice([0, 1, 2, 32])),
    "priority": lambda rng: int(rng.choice([-20, 0, 0, 0, 5])),
    "queue_timeout_s": lambda rng: float(rng.uniform(300, 600)),
    "cache_salt": lambda rng: str(rng.choice(["", "a", "b"])),
    "enable_prefix_caching": lambda rng: bool(rng.integers(2)),
    "timeout_s": lambda rng: float(rng.uniform(300, 600)),
    "logprobs": lambda rng: int(rng.integers(20, endpoint=True)),
    "prompt_logprobs": lambda rng: int(rng.integers(20, endpoint=True)),
    "detokenize": lambda _: True,
    "truncate_prompt_tokens": lambda rng: int(rng.choice([-1, 1, 50])),
    "skip_special_tokens": lambda rng: bool(rng.integers(2)),
    "spaces_between_special_tokens": lambda rng: bool(rng.integers(2)),
    "structured_outputs": lambda rng: (FORMS + [None] * FORMLESS)[rng.integers(len(FORMS) + FORMLESS)],
}
"""A value for each of SamplingParams' fields; without text, which detokenize false means, some of them are refused."""


def measure_random(model: str, ours: Ours) -> Iterator[Figure]:
    """How many requests a second, of which how many failed, and what was compiled meanwhile."""
    name = f"random {model}"
    with ours.client() as client:
        began, errors = time.perf_counter(), send_random(client, REQUESTS)
        rate = REQUESTS / (time.perf_counter() - began)
        compilations = client.status()["compilations_after_ready"]
    for error in sorted(set(errors)):
        print(f"scripts/bench: a request failed: {error}")
    yield figure(name, f"{REQUESTS:,} requests, {AT_ONCE} at once", "req/s", [rate])
    yield figure(name, "failed", "", [len(errors)], more_is_better=False)
    yield figure(name, "compilations after ready", "", [compilations], more_is_better=False)


def send_random(client: Client, count: int) -> list[str]:
    """Send them, the same each time, and wait for all; why those that failed did."""
    rng, limits = np.random.default_rng(0), client.welcome

    def ask(prompt: list[int], params: dict[str, Any], stream: bool) -> str | None:
        try:
            if stream:
                list(client.generate(prompt, **params))
            else:
                client.complete(prompt, **params)
        except OdriverError as error:
            return str(error)
        return None

    longest = min(LONGEST_PROMPT, limits.max_model_len - LONGEST_OUTPUT)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [
            pool.submit(ask, _prompt(rng, longest, limits.vocab_size), random_params(rng), stream=bool(rng.integers(2)))
            for _ in range(count)
        ]
        return [error for future in asked if (error := future.result()) is not None]


def random_params(rng: np.random.Generator) -> dict[str, Any]:
    """Always ``max_tokens``, and each of the others in half of all requests."""
    return {name: value(rng) for name, value in PARAMETERS.items() if name == "max_tokens" or rng.integers(2)}


def _prompt(rng: np.random.Generator, longest: int, vocabulary: int) -> list[int]:
    """As often of 1 to 10 tokens as of 100 to 1,000."""
    length = int(np.exp(rng.uniform(0, np.log(longest))))
    ids: list[int] = rng.integers(vocabulary, size=length).tolist()
    return ids
