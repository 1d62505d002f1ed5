"""The device's part of speculation, for the scheduler's model checker: how many drafts a sequence has, and which are right."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from engine.scheduling.plan import NextIterationPlan


class OnDevice(Protocol):
    """What the device knows of a sequence."""

    num_computed: int
    """Tokens whose keys and values are in pages, and are right."""
    num_drafts: int


@dataclass(frozen=True)
class Row:
    """What became of a row of a plan."""

    start: int
    """The place of its first token."""
    count: int
    kept: int
    """Of those, the first ones that are the sequence's."""
    num_tokens: int
    """Tokens that it gave."""
    num_drafts: int
    """Those that there are now for the tokens behind them."""


class SimulatedDrafts:
    """Runs steps in which rows have up to ``most`` drafts, right or wrong at random."""

    def __init__(self, random: Random, most: int) -> None:
        self._random = random
        self.most = most

    def run(self, plan: NextIterationPlan, sequences: Iterable[OnDevice]) -> list[Row]:
        """The rows of a plan, whose sequences these are."""
        return [self._run(plan, row, sequence) for row, sequence in enumerate(sequences)]

    def _run(self, plan: NextIterationPlan, row: int, sequence: OnDevice) -> Row:
        start, count, samples = plan.starts[row], plan.counts[row], plan.samples[row]
        kept = count
        if row < plan.num_decodes:
            start = sequence.num_computed
            kept = 1 + self._random.randint(0, min(count - 1, sequence.num_drafts))
        sequence.num_computed = start + kept
        if samples:
            sequence.num_drafts = self._random.randint(0, self.most)
        num_tokens = kept if samples and row < plan.num_decodes else samples
        return Row(start, count, kept, num_tokens, sequence.num_drafts)
