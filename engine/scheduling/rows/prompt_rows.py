"""The rows of a step that compute prompts: whose, and how much of each."""

from collections.abc import Sequence as ListOf

from engine.scheduling.admission import Admission
from engine.scheduling.estimates.prompt_room import PromptRoom
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.rows.prompt_chunks import PromptChunks
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.waiting.waiting_queue import WaitingQueue

SHORT = 8
"""A prompt is short with one in so many of a full step's tokens left, however few of them a step has."""


class PromptRows:
    """Adds them to plans that have their decoding rows. A step has at most ``budget`` tokens, and ``most_samples`` are
    sampled; long prompts get ``long`` tokens beside others, or half of what prompts may have where that is None."""

    def __init__(
        self,
        memory: SequenceMemory,
        waiting: WaitingQueue,
        running: RunningSequences,
        admission: Admission,
        prompt_room: PromptRoom,
        *,
        budget: int,
        most_samples: int,
        long: int | None,
    ) -> None:
        self._memory = memory
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._prompt_room = prompt_room
        self._budget = budget
        self._most_samples = most_samples
        self._long = long

    def add(self, plan: NextIterationPlan, *, may_admit: bool) -> None:
        """Grant tokens to long prompts, those of clients that run nothing, shorter ones, other waiting ones, and the rest
        to any of them.

        Beside decodes, in this step or waiting for their masks, the rest is granted only where
        time bounds the step.
        """
        begun = self._running.prefilling()
        if not begun and not self._waiting:
            return
        decoding = plan.num_tokens + self._running.late.num_sequences
        room = self._room(plan, begun, decoding)
        chunks = self._chunks(plan, room)
        long = [sequence for sequence in begun if chunks.is_long(sequence)]
        short = [sequence for sequence in begun if not chunks.is_long(sequence)]
        for sequence in long:
            chunks.grant(sequence)
        if may_admit:
            self._admission.admit_newcomers(chunks, others_begun=bool(short))
        for sequence in short:
            chunks.grant(sequence)
        if may_admit:
            self._admission.admit(chunks)
        if not decoding or (room is not None and self._long is None):
            chunks.grant_rest(begun)
        chunks.add_to(plan)

    def _room(self, plan: NextIterationPlan, begun: ListOf[Sequence], decoding: int) -> int | None:
        """Tokens that keep the step as short as it is to be; None where nobody knows, beside decoding rows."""
        if decoding and (begun or self._running.num_free):
            return self._prompt_room.beside(decoding, plan.num_passes)
        if decoding:
            return self._budget
        return self._prompt_room.alone(self._waiting.num_tokens + self._running.num_prompt_tokens)

    def _chunks(self, plan: NextIterationPlan, room: int | None) -> PromptChunks:
        half = (self._budget if room is None else room) // 2
        return PromptChunks(
            self._memory,
            self._budget - plan.num_tokens if room is None else room,
            self._long or half,
            self._most_samples - plan.num_tokens,
            0 if self._long else self._budget // SHORT,
        )
