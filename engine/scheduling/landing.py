"""What the tokens of a step do to its sequences."""

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from engine.scheduling.constraints.token_constraint import TokenConstraint
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.running_sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceOutput, SequenceStatus, TokenLogprobs
from engine.scheduling.speculation import Speculation
from engine.scheduling.waiting.waiting_queue import WaitingQueue

CHARGED_AT_ONCE = 16
"""Generated tokens after which a client is charged for them, as each charge has a price."""


class Landing:
    """Adds tokens to sequences, and ends those that have had their last one by ``finish``."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        speculation: Speculation | None,
        finish: Callable[[str], bool],
    ) -> None:
        self._waiting, self._running = waiting, running
        self._speculation = speculation
        self._finish = finish

    def land(self, plan: NextIterationPlan, result: StepResult) -> list[SequenceOutput]:
        """Add what the rows of a plan gave; late tokens of sequences that have ended are dropped."""
        outputs, all_logprobs, all_prompt_logprobs = [], result.logprobs, result.prompt_logprobs
        rows = zip(range(plan.num_rows), plan.sequences, plan.samples, result.token_ids, strict=True)
        for row, sequence, samples, token_ids in rows:
            sequence.num_in_flight -= samples
            if sequence.slot < 0 and sequence.status is SequenceStatus.FINISHED:
                continue
            if samples > len(token_ids) and sequence.slot >= 0:
                sequence.take_back(samples - len(token_ids), sequence.num_tokens + len(token_ids) - 1)
            prompt_logprobs: ListOf[TokenLogprobs] = ()
            if all_prompt_logprobs and row in all_prompt_logprobs:
                prompt_logprobs = _not_seen(sequence, *all_prompt_logprobs[row])
            if samples:
                if self._speculation is not None:
                    self._land_drafts(self._speculation, plan, row, result)
                added, reason = self._land(sequence, token_ids)
                logprobs = all_logprobs[row][: len(added)] if row in all_logprobs else ()
                outputs.append(SequenceOutput(sequence.request_id, added, reason, logprobs, prompt_logprobs))
            elif prompt_logprobs:
                outputs.append(SequenceOutput(sequence.request_id, [], prompt_logprobs=prompt_logprobs))
        return outputs

    def _land_drafts(self, speculation: Speculation, plan: NextIterationPlan, row: int, result: StepResult) -> None:
        """Learn what came of the drafts of a row that samples, and whether there are others."""
        sequence = plan.sequences[row]
        samples = plan.samples[row] if plan.samples_of is None else plan.counts[row]
        if samples > 1 or plan.looks_up:
            is_forced = sequence.constraint is not None and row not in plan.guesses
            num_forced = samples - 1 - plan.num_guessed.get(row, 0) if is_forced else None
            speculation.land(sequence, samples, len(result.token_ids[row]), result.drafts[row], num_forced)
            sequence.has_earlier_drafts = bool(result.of_earlier) and result.of_earlier[row]
        else:
            sequence.num_drafts = 0

    def note_expected(self, sequence: Sequence) -> None:
        """Its constraint, if it has one, has answered, and may say what it expects."""
        if self._speculation is not None and sequence.constraint is not None:
            expected, num_forced = sequence.constraint.expected, sequence.constraint.num_forced
            sequence.expected = expected[:num_forced] if self._speculation.has_model else expected
            sequence.num_forced = num_forced

    def _land(self, sequence: Sequence, token_ids: list[int]) -> tuple[list[int], str | None]:
        """Add tokens up to its last one, also where the sequence waits again.

        Returns those that were added, and the reason if one was the last.
        """
        output, reason = sequence.output_token_ids, None
        count = before = len(output)
        for token_id in token_ids:
            output.append(token_id)
            count += 1
            if token_id in sequence.stop_token_ids:
                reason = "stop"
            elif count >= sequence.max_tokens:
                reason = "length"
            if reason is not None:
                token_ids = token_ids[: count - before]
                break
        if sequence.slot < 0:
            self._waiting.add_tokens(count - before)
        elif count - sequence.num_charged_tokens >= CHARGED_AT_ONCE:
            self._waiting.charge_output(sequence)
            self._running.expect(sequence)
        if reason is not None:
            self._finish(sequence.request_id)
        elif sequence.constraint is not None:
            self._constrain(sequence, sequence.constraint, token_ids)
        return token_ids, reason

    def _constrain(self, sequence: Sequence, constraint: TokenConstraint, token_ids: list[int]) -> None:
        """Tell a constraint what has landed, which it has not answered to yet."""
        constraint.advance(*token_ids, guess=self._running.late.guess(sequence))
        sequence.awaits_mask = True
        count = len(token_ids)
        as_expected = list(sequence.expected[:count]) == token_ids
        sequence.expected = sequence.expected[count:] if as_expected else ()
        sequence.num_forced = max(0, sequence.num_forced - count) if as_expected else 0
        if sequence.slot < 0:
            constraint.suspend()


def _not_seen(sequence: Sequence, first: int, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens, from index ``first`` on, that no step has given before.

    After preemption a step gives them again.
    """
    if not logprobs:
        return logprobs
    known = sequence.num_prompt_logprobs
    sequence.num_prompt_logprobs = max(known, first + len(logprobs))
    return logprobs[max(0, known - first) :]
