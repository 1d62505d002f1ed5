"""Requests that come as they do elsewhere: arrivals in bursts, few clients that send most, long prompts.

Only shapes are borrowed, none of the published rows:

- Arrivals of a client follow a gamma process whose coefficient of variation is above 1: BurstGPT (Wang et al. 2024,
  arXiv 2401.17644), section on concurrency. Rates of clients follow Zipf's law, and it is single clients that burst:
  ServeGen (Xiang et al. 2026).
- Lengths of conversations: Azure's LLM inference trace of 2023 (Patel et al. 2024, Splitwise): prompts of 1,020 and
  outputs of 129 tokens in the median, 1,155 and 211 on average.
- Lengths of long prompts: Mooncake (Qin et al. 2024, arXiv 2407.00079): 7,590 tokens in and 182 out on average.
- Long outputs, of models that reason: longer than their prompts, as ServeGen has it of DeepSeek-R1; the figures are ours.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLIENTS = 50
ZIPF = 1.1
"""A client's rate is 1 / rank**ZIPF: the first of 50 sends 23 %, the last ten 5 % together."""


@dataclass(frozen=True)
class Lengths:
    """Tokens, log-normal, cut off at ``longest``."""

    median: float
    spread: float
    """Standard deviation of the logarithm; the mean is ``median * exp(spread**2 / 2)`` before the cut."""
    longest: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """As many lengths, each at least 1."""
        tokens = self.median * np.exp(self.spread * rng.standard_normal(count))
        return np.clip(tokens, 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Kind:
    """What one client sends."""

    prompt: Lengths
    output: Lengths


CONVERSATION = Kind(Lengths(1020, 0.8, 4096), Lengths(129, 0.99, 1024))
LONG_PROMPTS = Kind(Lengths(6200, 0.7, 16384), Lengths(115, 0.96, 1024))
LONG_OUTPUTS = Kind(Lengths(1020, 0.8, 4096), Lengths(1500, 0.8, 8192))


@dataclass(frozen=True)
class Shape:
    """How a trace looks."""

    name: str
    variation: float
    """Coefficient of variation of the time between two requests of a client; 1 is a Poisson process."""
    kinds: tuple[Kind, ...]
    """What the clients send, in turns by rank."""
    rates: tuple[float, ...]
    """Requests a second, of all clients together, to be tried: from an easy load to one beyond the device."""
    share: float
    """Of all requests that are simulated."""


SHAPES = (
    Shape("bursty", 4.0, (CONVERSATION,), (30.0, 40.0, 50.0, 60.0), 0.55),
    Shape("long prompts", 2.0, (LONG_PROMPTS, CONVERSATION), (10.0, 12.0, 14.0, 16.0), 0.38),
    Shape("long outputs", 4.0, (LONG_OUTPUTS,), (6.0, 6.5, 7.0, 7.5), 0.07),
)


@dataclass(frozen=True)
class Trace:
    """Requests in the order they come; arrays of one length."""

    arrival: NDArray[np.float64]
    """Seconds."""
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    client: NDArray[np.int64]


def draw_trace(shape: Shape, rate: float, count: int) -> Trace:
    """``count`` requests at ``rate`` a second: the same each time, whatever the rate but for the times."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, CLIENTS + 1) ** ZIPF
    counts = rng.multinomial(count, weights / weights.sum())
    parts = [_of_client(rng, shape, client, int(many), count / rate) for client, many in enumerate(counts) if many]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    arrival, prompt, output, client = (column[order] for column in columns)
    return Trace(arrival, prompt, output, client)


def _of_client(
    rng: np.random.Generator, shape: Shape, client: int, count: int, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Its arrivals fill these seconds."""
    form = 1 / shape.variation**2
    gaps = rng.gamma(form, size=count + 1)
    arrival = np.cumsum(gaps)[:-1] * (seconds / gaps.sum())
    kind = shape.kinds[client % len(shape.kinds)]
    return arrival, kind.prompt.draw(rng, count), kind.output.draw(rng, count), np.full(count, client)
