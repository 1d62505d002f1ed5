"""A load: which requests are sent, when, and how each fared. It loads no jax."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipc.benchmark.timeline import Timeline
from ipc.client import Client
from ipc.errors import OdriverError

MOST_TOKENS = 10**8
"""Tokens of all prompts, which are made before the first is sent."""
LONGEST = 7 * 86400.0
"""Seconds in which all requests are to be sent, on average."""
LEAST_BURSTINESS = 1e-3


class LoadError(OdriverError, ValueError):
    """A load that cannot be; the message names the wrong value."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of random token ids, named and meant as in ``vllm bench serve``; raises LoadError
    where one can't be.

    ``request_rate`` is in requests per second, and infinite sends all at once. The times between
    two requests follow a gamma distribution of the shape ``burstiness``: 1 is a Poisson process,
    less comes in bursts, more is steadier.
    """

    num_prompts: int = 1000
    random_input_len: int = 128
    random_output_len: int = 128
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    """Limit of open requests; others wait here, before their clocks start. None is no limit."""
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "max_concurrency"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "at least 1", value)
        for name in ("request_rate", "burstiness"):
            _require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        _require(math.isfinite(self.burstiness), "burstiness", "finite", self.burstiness)
        _require(self.burstiness >= LEAST_BURSTINESS, "burstiness", f"at least {LEAST_BURSTINESS}", self.burstiness)
        num_tokens = self.num_prompts * self.random_input_len
        _require(
            num_tokens <= MOST_TOKENS,
            "num_prompts times random_input_len",
            f"at most {MOST_TOKENS:,}",
            f"{num_tokens:,}",
        )
        least = self.num_prompts / LONGEST
        _require(
            self.request_rate >= least,
            "request_rate",
            f"at least {least:.3g}, with which {self.num_prompts:,} requests take a week",
            self.request_rate,
        )
        _require(self.seed >= 0, "seed", "0 or more", self.seed)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt; the same seed gives the same ones."""
        rng = np.random.default_rng((self.seed, 0))
        ids: list[list[int]] = rng.integers(vocab_size, size=(self.num_prompts, self.random_input_len)).tolist()
        return ids

    def send_times(self) -> list[float]:
        """Seconds after the start at which each request is due, the first at 0."""
        if math.isinf(self.request_rate):
            return [0.0] * self.num_prompts
        rng = np.random.default_rng((self.seed, 1))
        gaps = rng.gamma(self.burstiness, 1 / (self.request_rate * self.burstiness), self.num_prompts - 1)
        return [0.0, *np.cumsum(gaps).tolist()]

    def params(self) -> dict[str, object]:
        """The sampling parameters of every request."""
        return {"max_tokens": self.random_output_len, "temperature": 0.0, "ignore_eos": self.ignore_eos}


def send(
    client: Client,
    prompts: Sequence[list[int]],
    params: Mapping[str, Any],
    *,
    times: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    stream: bool = True,
    on_end: Callable[[Timeline], None] | None = None,
) -> list[Timeline]:
    """Send each prompt at its time, each in a thread of its own, and follow all answers to their
    ends.

    ``times`` None sends all at once. Without ``stream`` each answer comes in one piece. ``on_end``
    is called for each finished request, on any thread. A failed request has its error in its
    timeline. Any other failure, such as Ctrl-C, closes the client.
    """
    began = time.monotonic()
    pool = ThreadPoolExecutor(max_concurrency or len(prompts), thread_name_prefix="load")

    def follow(prompt: list[int]) -> Timeline:
        timeline = _follow(client, prompt, params, stream)
        if on_end is not None:
            on_end(timeline)
        return timeline

    try:
        followers = []
        for prompt, at in zip(prompts, times or [0.0] * len(prompts), strict=True):
            time.sleep(max(0.0, began + at - time.monotonic()))
            followers.append(_submitted(pool, follow, prompt))
        return [follower.result() for follower in followers]
    except BaseException:
        client.close()  # ends every open request, and so the threads
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _submitted(
    pool: ThreadPoolExecutor, follow: Callable[[list[int]], Timeline], prompt: list[int]
) -> Future[Timeline]:
    try:
        return pool.submit(follow, prompt)
    except RuntimeError as error:
        raise LoadError(
            f"this machine lets a program have no more threads than {threading.active_count()}, and each open request "
            "takes one: limit those with --max-concurrency"
        ) from error


def _follow(client: Client, prompt: list[int], params: Mapping[str, Any], stream: bool) -> Timeline:
    timeline = Timeline(len(prompt), time.monotonic())
    try:
        for piece in client.generate(prompt, stream=stream, **params):
            if piece.token_ids:
                timeline.arrivals.append((time.monotonic(), len(piece.token_ids)))
    except OdriverError as error:
        timeline.error = str(error)
    return timeline


def _require(holds: bool, name: str, allowed: str, given: object) -> None:
    if not holds:
        raise LoadError(f"{name} must be {allowed}, not {given}")
