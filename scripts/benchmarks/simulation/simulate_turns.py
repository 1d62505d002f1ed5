"""What a tier in host memory is worth on a TPU v6e that serves Llama-3-8B: simulated, with the real scheduler.

Users talk to it in turns, each of which sends all that was said before. What they have said does not fit into the
device's pages, and fits into the host's. The chip is at its roofline and the link at its published rate.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from caching.cache_groups import CacheGroups
from caching.host_tier import HostTier
from caching.metadata import pages_for
from caching.page_manager import HBMPageManager
from caching.tpu.tpu_chip import CHIPS
from engine.sampling_params import SamplingParams
from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.host_cache.host_budget import STEPS_STAGED
from ipc.benchmark.timeline import percentile
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, figure
from scripts.benchmarks.simulation.accelerator import Accelerator, CostModel, Transformer

CHIP = CHIPS["TPU v6 lite"]
DEVICE = Accelerator(
    chips=1, memory=CHIP.hbm_bytes, bandwidth=CHIP.hbm_bandwidth, flops=CHIP.bf16_flops, overhead=0.5e-3
)
"""The overhead is taken, not measured: of the host, as there is no other chip to exchange with."""
PAGE_SIZE, MAX_NUM_SEQS, BUDGET, RUN_AHEAD = 128, 64, 2048, 1
USERS, TURNS, THINK_SECONDS = 200, 8, 60.0
FIRST_PROMPT, PROMPT, OUTPUT = 2000, 300, 200
"""Tokens, on average: each is drawn between a half of it and one and a half."""
HOST_GIB = 128
"""A v6e's host has 1,536 GiB for eight chips."""


@dataclass
class Played:
    """What a run gave."""

    ttft: list[float]
    """Seconds of each turn but the first."""
    computed: int
    """Prompt tokens."""
    loaded: int
    """Pages that came from the host."""
    seconds: float


class Link:
    """Copies between host and device: each way in order, at the chip's rate."""

    def __init__(self, page_seconds: float) -> None:
        self._page_seconds = page_seconds
        self._arrivals: tuple[deque[float], deque[float]] = deque(), deque()
        self._free = [0.0, 0.0]

    def begin(self, copies: Copies, now: float) -> None:
        """The copies of a plan."""
        for way, pages in enumerate((copies.stores, copies.fetches)):
            if pages:
                self._free[way] = max(now, self._free[way]) + len(pages) * self._page_seconds
                self._arrivals[way].append(self._free[way])

    def take_landed(self, now: float) -> tuple[int, int]:
        """Lists of stores and of fetches that have arrived."""
        counts = [0, 0]
        for way, arrivals in enumerate(self._arrivals):
            while arrivals and arrivals[0] <= now:
                arrivals.popleft()
                counts[way] += 1
        return counts[0], counts[1]

    @property
    def next_fetch(self) -> float | None:
        """When the next pages arrive on the device."""
        return self._arrivals[1][0] if self._arrivals[1] else None


class TurnsSimulator:
    """Drives a scheduler through the conversations of all users, in a time that is a number."""

    def __init__(self, host_gib: float, users: int, turns: int) -> None:
        model = Transformer()
        self._model = CostModel(model, DEVICE)
        page_bytes = PAGE_SIZE * model.bytes_per_token
        page_seconds = page_bytes / CHIP.host_bandwidth
        staged = STEPS_STAGED * pages_for(BUDGET, PAGE_SIZE)
        tier = HostTier(int(host_gib * 2**30) // page_bytes, staged) if host_gib else None
        pages = HBMPageManager(self._model.num_pages(PAGE_SIZE) - 2 * staged, tier)
        self._tier, self._cost = tier, CopyCost(page_seconds, BUDGET)
        self._memory = SequenceMemory(pages, CacheGroups(PAGE_SIZE), cost=self._cost)
        self._scheduler = InferenceScheduler(self._memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
        self._link = Link(page_seconds)
        self._in_flight: deque[tuple[NextIterationPlan, float]] = deque()
        self._now = self._device_free = 0.0
        self._rng = np.random.default_rng(0)
        self._turns = turns
        self._asked = [(float(self._rng.uniform(0, THINK_SECONDS)), user, 0) for user in range(users)]
        heapq.heapify(self._asked)
        self._said = [self._draw(FIRST_PROMPT) - PROMPT for _ in range(users)]
        self._open: dict[str, tuple[Sequence, float, int, int]] = {}
        self._played = Played([], 0, 0, 0.0)

    def run(self) -> Played:
        """Until everybody has said everything."""
        while self._asked or self._open:
            if not self._open:
                self._now = max(self._now, self._asked[0][0])
            while self._asked and self._asked[0][0] <= self._now:
                self._ask(*heapq.heappop(self._asked))
            self._step()
        self._played.seconds = self._now
        self._played.loaded = self._tier.pages_loaded if self._tier is not None else 0
        return self._played

    def _draw(self, average: int) -> int:
        return int(self._rng.integers(average // 2, average + average // 2))

    def _ask(self, at: float, user: int, turn: int) -> None:
        self._said[user] += self._draw(PROMPT)
        name = f"{user}.{turn}"
        sequence = Sequence(
            name, [0] * self._said[user], SamplingParams(temperature=0), frozenset(), self._draw(OUTPUT), 0,
            client=str(user), salt=user.to_bytes(8),
        )  # fmt: skip
        self._open[name] = sequence, at, user, turn
        self._scheduler.add(sequence)

    def _step(self) -> None:
        """As oEngine.step."""
        if self._memory.host is not None:
            self._memory.host.landed([self._link.take_landed(self._now)])
        plan = self._scheduler.plan(self._now)
        for copies in plan.copies if plan is not None else ():
            self._link.begin(copies, self._now)
        if plan is not None and plan.num_rows:
            seconds = self._model.seconds(plan)
            self._cost.learn(plan.num_tokens - plan.num_decodes, plan.num_tokens, seconds)
            self._played.computed += plan.num_tokens - plan.num_decodes
            self._device_free = max(self._now, self._device_free) + seconds
            self._in_flight.append((plan, self._device_free))
        if plan is None or not plan.num_rows or len(self._in_flight) > RUN_AHEAD:
            self._land()

    def _land(self) -> None:
        if not self._in_flight:
            assert self._link.next_fetch is not None, "work is left, but nothing can be planned and nothing will land"
            self._now = max(self._now, self._link.next_fetch)
            return
        plan, done = self._in_flight.popleft()
        self._now = max(self._now, done)
        for output in self._scheduler.update(plan, StepResult([[0] * samples for samples in plan.samples])):
            sequence, asked_at, user, turn = self._open[output.request_id]
            if turn and len(sequence.output_token_ids) == 1:
                self._played.ttft.append(self._now - asked_at)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._said[user] += len(sequence.output_token_ids)
                if turn + 1 < self._turns:
                    heapq.heappush(self._asked, (self._now + THINK_SECONDS, user, turn + 1))


def measure_simulated_turns(users: int = USERS, turns: int = TURNS) -> Iterator[Figure]:
    """Prompt tokens computed and time to first token, beside the same without the tier."""
    ours, other = (TurnsSimulator(gib, users, turns).run() for gib in (HOST_GIB, 0))
    group = f"turns simulated on {DEVICE.chips} v6e"
    for name, unit, values in (
        ("prompt tokens computed", "", [run.computed for run in (ours, other)]),
        ("TTFT p50", "ms", [MILLISECONDS * percentile(run.ttft, 50) for run in (ours, other)]),
        ("TTFT p99", "ms", [MILLISECONDS * percentile(run.ttft, 99) for run in (ours, other)]),
        ("all conversations", "s", [run.seconds for run in (ours, other)]),
    ):
        yield figure(group, name, unit, [values[0]], more_is_better=False, others={"without a tier": [values[1]]})
    yield figure(group, "pages copied from the host", "", [ours.loaded])
