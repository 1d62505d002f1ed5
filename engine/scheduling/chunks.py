"""How much of which prompts a step computes, while that is being decided."""

from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence


class Chunks:
    """The step has ``room`` for so many tokens more."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.counts: dict[Sequence, int] = {}

    def grant(self, sequence: Sequence, most: int) -> int:
        """Up to ``most`` more tokens of this prompt, as far as there is room; how many."""
        granted = min(self.left(sequence), most, self.room)
        if granted > 0:
            self.counts[sequence] = self.counts.get(sequence, 0) + granted
            self.room -= granted
        return granted

    def left(self, sequence: Sequence) -> int:
        """Tokens of its prompt that neither earlier steps compute nor this one."""
        return sequence.num_prefill_tokens - self.end(sequence)

    def end(self, sequence: Sequence) -> int:
        """Its first token that they do not compute."""
        return sequence.num_computed_tokens + self.counts.get(sequence, 0)

    def add_to(self, plan: NextIterationPlan) -> None:
        """Rows of the step, in the order in which they were granted something."""
        for sequence, count in self.counts.items():
            plan.add(sequence, count)
