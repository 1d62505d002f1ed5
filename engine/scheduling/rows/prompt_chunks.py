"""How the tokens that decoding rows leave of a step are divided among prompts."""

from collections.abc import Iterable

from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory


class PromptChunks:
    """Grants prompts chunks of a step that has ``room`` for so many more tokens, and for so many more ``rows``: the
    sampler has one for each, be it that it does not sample. A prompt that would be one too many waits for the next step.

    A prompt is long if more than ``long`` of its tokens are left, and more than ``short``, which
    are short in the smallest step, too; all long prompts together get at most ``long`` tokens of
    the step, until ``grant_rest`` divides what nobody else needs.
    """

    def __init__(self, memory: SequenceMemory, room: int, long: int, rows: int, short: int) -> None:
        self.room = room
        self._rows = rows
        self.counts: dict[Sequence, int] = {}
        """Tokens granted."""
        self._memory = memory
        self._left_for_long = max(1, long)
        self._long = max(1, long, short)

    def defers(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens left is long, and long prompts get no more."""
        return self.is_long_with(num_tokens) and self._left_for_long <= 0

    def is_long(self, sequence: Sequence) -> bool:
        """Whether a prompt is long."""
        return self.is_long_with(self._left(sequence))

    def is_long_with(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens left is."""
        return num_tokens > self._long

    def grant(self, sequence: Sequence) -> None:
        """Compute as much of the prompt as there is room for."""
        if self.is_long(sequence):
            self._left_for_long -= self._grant(sequence, self._left_for_long)
        else:
            self._grant(sequence, self.room)

    def grant_rest(self, sequences: Iterable[Sequence]) -> None:
        """Divide the room that is left among prompts with a chunk, then among these."""
        for sequence in [*self.counts, *sequences]:
            self._grant(sequence, self.room)

    def add_to(self, plan: NextIterationPlan) -> None:
        """Add the rows to the plan, in the order of the first grants."""
        for sequence, count in self.counts.items():
            plan.add(sequence, count)

    def _grant(self, sequence: Sequence, most: int) -> int:
        """Grant up to ``most`` more tokens, and cache the pages that they fill; how many."""
        start = self._end(sequence)
        if sequence not in self.counts and self._rows <= 0:
            return 0
        most = min(self._left(sequence), most, self.room)
        granted = self._memory.row_end(sequence, start + most) - start if most > 0 else 0
        if granted <= 0:
            return 0
        self._rows -= sequence not in self.counts
        self.counts[sequence] = self.counts.get(sequence, 0) + granted
        self.room -= granted
        self._memory.computed(sequence, start, start + granted)
        return granted

    def _left(self, sequence: Sequence) -> int:
        return sequence.num_prefill_tokens - self._end(sequence)

    def _end(self, sequence: Sequence) -> int:
        return sequence.num_computed_tokens + self.counts.get(sequence, 0)
