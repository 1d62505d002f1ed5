"""The rows of a step that decode: a token each, and drafts behind it where there are any."""

from engine.scheduling.admission import Admission
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation
from engine.scheduling.waiting.waiting_queue import WaitingQueue


class DecodeRows:
    """Adds them to plans. A step has at most ``budget`` tokens, and ``most_samples`` are sampled."""

    def __init__(
        self,
        memory: SequenceMemory,
        speculation: Speculation | None,
        waiting: WaitingQueue,
        running: RunningSequences,
        admission: Admission,
        *,
        budget: int,
        max_num_seqs: int,
        most_samples: int,
    ) -> None:
        self._memory = memory
        self._speculation = speculation
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._most_samples = most_samples

    def add(self, plan: NextIterationPlan, decoding: list[Sequence]) -> None:
        """Add the rows of those that have a page for their next token at least."""
        sequences = [s for s in decoding if s.num_computed_tokens < s.num_paged_tokens]
        if self._speculation is None:
            plan.add_decodes(sequences)
            return
        pages_suffice = len(sequences) == len(decoding)
        drafts = self._speculation.drafts(sequences, self._room_for_drafts(len(sequences)), self._budget)
        if not drafts:
            plan.add_decodes(sequences)
            return
        for sequence, count in drafts.items():
            end = sequence.num_computed_tokens + 1 + count
            while pages_suffice and end > sequence.num_paged_tokens and self._memory.grow(sequence):
                plan.grown.append(sequence)
            drafts[sequence] = count - max(0, end - sequence.num_paged_tokens)
        drafts = {sequence: count for sequence, count in drafts.items() if count}
        rows = [sequence for sequence in sequences if sequence not in drafts] + list(drafts)
        plan.add_decodes(rows, [drafts.get(sequence, 0) for sequence in rows])
        plan.num_passes = self._speculation.passes(max((plan.counts[row] - 1 for row in plan.drafted), default=0))

    def _room_for_drafts(self, num_decodes: int) -> int:
        """Tokens that may be sampled beside those of the rows that the step is likely to have: of running sequences, and
        of one more that starts than have in the last plan. More of them are computed in the next step.

        Prompts that have begun have half of what the step leaves, if they need so much: else they would wait for as long
        as texts go on whose drafts are right.
        """
        starting = min(len(self._waiting), self._admission.num_started + 1)
        rows = min(self._max_num_seqs, len(self._running) + starting)
        left = self._budget - num_decodes
        return min(self._most_samples - rows, max(left // 2, left - self._running.num_prompt_tokens))
