"""The device's part of speculation, for the scheduler's model checker: how many drafts a sequence has, and which are right."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Protocol

from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from scripts.benchmarks.histories.life import WRONG


class OnDevice(Protocol):
    """What the device knows of a sequence."""

    sequence: Sequence
    tokens: list[int]
    """The prompt and all of the output."""
    num_computed: int
    """Tokens whose keys and values are in pages, and are right."""
    num_drafts: int


RIGHT = 0.7
"""How often a draft of a draft model is the sequence's token."""


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
    """Runs steps in which rows have up to ``most`` drafts: those that are forced, or right or wrong at random.

    ``has_model`` is whether rows with constraints have such, too: then these have to be read.
    """

    def __init__(self, random: Random, most: int) -> None:
        self._random = random
        self.most = most
        self.has_model = bool(most) and random.random() < 0.5
        self._late: dict[Sequence, tuple[int, int]] = {}
        """Of rows that are to sample late, the place of their first token, and the drafts that are right."""
        self._written: dict[NextIterationPlan, dict[int, list[int]]] = {}
        """By row that is to sample late, what a draft model has drafted for it."""

    def read(self, plan: NextIterationPlan) -> None:
        """Read what the draft model has written for rows of a plan that sample late."""
        plan.guesses.update(self._written.pop(plan))

    def run(self, plan: NextIterationPlan, sequences: Iterable[OnDevice]) -> list[Row]:
        """The rows of a plan, whose sequences these are."""
        return [self._run(plan, row, sequence) for row, sequence in enumerate(sequences)]

    def _run(self, plan: NextIterationPlan, row: int, sequence: OnDevice) -> Row:
        start, count, samples = plan.starts[row], plan.counts[row], plan.samples[row]
        if plan.samples_of is not None:
            return self._sample_late(plan, row, sequence)
        kept = count
        if row < plan.num_decodes:
            start = sequence.num_computed
            if sequence.sequence.constraint is None:
                kept = 1 + self._random.randint(0, min(count - 1, sequence.num_drafts))
            else:
                kept = 1 + self._num_right(plan, row, sequence)
                self._late[sequence.sequence] = start, kept - 1
        sequence.num_computed = start + kept
        if samples:
            sequence.num_drafts = self._random.randint(0, self.most) if plan.looks_up else 0
        num_tokens = kept if samples and row < plan.num_decodes else samples
        return Row(start, count, kept, num_tokens, sequence.num_drafts)

    def _num_right(self, plan: NextIterationPlan, row: int, sequence: OnDevice) -> int:
        """Drafts that were fed in their places, and are the sequence's tokens."""
        if row not in plan.expected:
            assert self.has_model or plan.counts[row] == 1, "a row has drafts of nobody"
            left = len(sequence.tokens) - sequence.num_computed - 1
            trials = (self._random.random() < RIGHT for _ in range(min(plan.counts[row] - 1, left)))
            num_right = sum(1 for _ in takewhile(bool, trials))
            if plan.counts[row] > 1:
                right = sequence.tokens[sequence.num_computed + 1 :][:num_right]
                written = right + [WRONG] * (plan.counts[row] - 1 - num_right)
                self._written.setdefault(plan, {})[row] = written
            return num_right
        if plan.starts[row] != sequence.num_computed:
            return 0
        follows = sequence.tokens[sequence.num_computed + 1 :]
        pairs = zip(plan.expected.get(row, ()), follows, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _sample_late(self, plan: NextIterationPlan, row: int, sequence: OnDevice) -> Row:
        """Drafts are accepted as far as they have masks."""
        first, num_right = self._late.pop(sequence.sequence)
        accepted = min(num_right, len(plan.expected.get(row, ())))
        start = plan.starts[row]
        assert not accepted or start == first + 1, "drafts of another place are accepted"
        sequence.num_computed = start + accepted
        return Row(start, 0, accepted, 1 + accepted, 0)
