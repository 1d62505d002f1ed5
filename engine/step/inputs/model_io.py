"""Converts a plan to a StepDescription: a packed i32 array, and extras of some of its rows."""

from bisect import bisect_left
from collections.abc import Sequence as ListOf
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_bias import bias_of
from engine.sampling.needs import SAMPLERS, Need, needs_of
from engine.sampling.penalties import penalties_of
from engine.sampling.sampler_inputs import num_fields
from engine.sampling.token_masks import pack_masks
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.speculation.history import earlier_width, expected_rows, own_width, piece, pieces
from engine.step.commands import ForgetLogits, KeptRows, SampleKept, StepDescription
from engine.step.inputs.layout import FROM_SLOT, StepLayout
from engine.step.inputs.prompt_logprobs import PromptLogprobs, prompt_logprobs_of, prompt_tokens
from engine.step.inputs.slot_state import FIRST_PARAMETER, NO_ADMISSIONS, SEPARATE, SlotChanges, SlotShapes, admissions

_slot_of = attrgetter("slot")


class _Kept(NamedTuple):
    """Logits that are kept of a plan."""

    number: int
    """As in KeptRows."""
    num_rows: int
    places: dict[Sequence, int]
    """Which of these rows is whose first."""


class ModelIOProcessor:
    """Converts each plan, in order, to a StepDescription: what is new to the device's SlotState.

    ``few_rows`` are those of the sampler for few rows, ``draft_rows`` those of DRAFT, ascending;
    none without it. ``feeds_drafts`` is whether a draft model is to be fed what DRAFT does not feed.
    """

    def __init__(
        self,
        shapes: SlotShapes,
        vocab_size: int,
        few_rows: int,
        draft_rows: ListOf[int] = (),
        *,
        feeds_drafts: bool = False,
    ) -> None:
        self._shapes = shapes
        self._vocab_size = vocab_size
        self._few_rows, self._draft_rows, self._feeds_drafts = few_rows, draft_rows, feeds_drafts
        self._needs = np.zeros(shapes.max_num_seqs, np.int32)
        """By slot, its Need flags."""
        self._num_written: list[list[int]] = [[] for _ in range(shapes.max_num_seqs)]
        """By slot and group, the entries of its page table that the device has."""
        self._earlier: list[ListOf[int]] = [()] * shapes.max_num_seqs
        """By slot, the earlier texts that the device has."""
        self._blanks: dict[int, NDArray[np.int32]] = {}
        """By a bucket's tokens, the packed array without rows."""
        self._kept: dict[NextIterationPlan, _Kept] = {}
        """Of plans with rows that sample late."""
        self._num_kept = 0

    def prepare(self, plan: NextIterationPlan, layout: StepLayout) -> tuple[StepDescription, list[PromptLogprobs]]:
        """A plan in a bucket, and the prompt tokens whose logprobs it computes, in order.

        All arrays are new, because the device may still read the earlier ones.
        """
        changes, packed = self._changes(plan), self._blank(layout)
        drafted = self._drafted(plan)
        fits = layout.writes.hold(changes) and drafted is None  # that is drafted before the step
        if fits:
            layout.writes.pack(changes, layout.view(packed, "writes"))
        slots = np.fromiter(map(_slot_of, plan.sequences), np.int32, plan.num_rows)
        samples = np.fromiter(plan.samples, np.int32, plan.num_rows)
        self._write_rows(plan, layout, packed, slots, samples)
        _write_tokens(plan, layout.view(packed, "token_ids"))
        needed = self._needed(plan, slots, samples)
        prompt_logprobs = prompt_logprobs_of(plan) if Need.PROMPT_LOGPROBS in needed else []
        return StepDescription(
            tokens=layout.tokens,
            packed=packed,
            needs=needed,
            changes=[] if fits else list(SEPARATE.pack_all(changes, self._shapes)),
            bias=[(one.slot, bias_of(one, self._vocab_size)) for one in plan.admitted if self._has(one, Need.BIAS)],
            penalties=[
                (one.slot, penalties_of(one, self._vocab_size))
                for one in plan.admitted
                if self._has(one, Need.PENALTIES)
            ],
            history=self._pieces(plan.admitted),
            masks=self._masks(plan, layout) if plan.constrained else None,
            prompt_tokens=prompt_tokens(plan, prompt_logprobs) if prompt_logprobs else None,
            has_adapters=bool(plan.read_slots),
            kept=self._keep(plan, layout) if plan.late else None,
            samples=any(plan.samples),
            drafted=drafted,
            feeds_draft_model=self._feeds_drafts and len(plan.drafted) < plan.num_rows,
            expected=self._expected(plan) if plan.expected else None,
        ), prompt_logprobs

    def _blank(self, layout: StepLayout) -> NDArray[np.int32]:
        """A new packed array, all rows of which are padding."""
        if layout.tokens not in self._blanks:
            blank = self._blanks[layout.tokens] = np.zeros(layout.size, np.int32)
            layout.view(blank, "slots")[:] = self._shapes.dump_slot
            layout.view(blank, "writes")[:] = layout.writes.blank(self._shapes)
        return self._blanks[layout.tokens].copy()

    def _drafted(self, plan: NextIterationPlan) -> NDArray[np.int32] | None:
        """The slots of rows with drafts, and of how many, if a draft model writes them."""
        sizes = self._draft_rows
        rows = plan.drafted if sizes else []
        if not rows:
            return None
        count = len(rows)
        drafted = np.zeros((2, sizes[bisect_left(sizes, count)]), np.int32)
        drafted[0, count:] = self._shapes.dump_slot
        drafted[0, :count] = [plan.sequences[row].slot for row in rows]
        drafted[1, :count] = [plan.counts[row] - 1 for row in rows]
        return drafted

    def _pieces(self, admitted: ListOf[Sequence]) -> list[NDArray[np.int32]]:
        """What the history has to have of sequences that got a slot, if there is one."""
        if not self._shapes.num_drafts:
            return []
        written: list[NDArray[np.int32]] = []  # no call of the type, which takes 10 us
        width = earlier_width(self._shapes.num_earlier)
        first = own_width(self._shapes.max_model_len, self._shapes.num_drafts)
        for sequence in admitted:
            written += pieces(sequence.slot, _known_tokens(sequence, 0, sequence.num_tokens))
            if sequence.earlier is not self._earlier[sequence.slot]:
                written.append(piece(sequence.slot, first, sequence.earlier, width))
                self._earlier[sequence.slot] = sequence.earlier
        return written

    def _expected(self, plan: NextIterationPlan) -> NDArray[np.int32]:
        """What the history has to have behind the last tokens of rows with drafts that are known."""
        drafts = ((plan.sequences[row].slot, 1 + plan.starts[row], ids) for row, ids in plan.expected.items())
        return expected_rows(drafts, self._shapes.max_num_seqs, self._shapes.num_drafts)

    def _masks(self, plan: NextIterationPlan, layout: StepLayout) -> NDArray[np.int32]:
        return pack_masks(plan, self._sampler_rows(plan), layout.rows, self._vocab_size)

    def _sampler_rows(self, plan: NextIterationPlan) -> ListOf[int]:
        return plan.sampler_rows(drafts=bool(self._shapes.num_drafts))

    def prepare_late(self, plan: NextIterationPlan) -> tuple[SampleKept, list[int]]:
        """A plan that samples from the kept logits of an earlier one, and the place of each of its
        rows' first among those.

        The rows behind those that sample are there too, for drafts that are wrong, as if no draft
        came before them.
        """
        assert plan.samples_of is not None
        kept, slots = self._kept[plan.samples_of], np.array([sequence.slot for sequence in plan.sequences])
        needs = self._needs[slots] & SAMPLERS
        places = [kept.places[sequence] for sequence in plan.sequences]
        parameters = admissions(plan.sequences, plan.starts, needs.tolist())[:, FIRST_PARAMETER:]
        row = np.repeat(np.arange(plan.num_rows), plan.counts)
        yes, offsets = np.ones_like(row), np.concatenate([np.arange(count) for count in plan.counts])
        columns = (
            slots[row], yes, yes, np.array(plan.starts)[row] + offsets, *parameters[row].T, offsets,
            np.maximum(np.array(plan.samples)[row] - 1 - offsets, 0), yes,
        )  # fmt: skip
        sampling = np.zeros((num_fields(drafts=bool(self._shapes.num_drafts)), kept.num_rows), np.int32)
        sampling[:, np.array(places)[row] + offsets] = np.vstack(columns[: len(sampling)])  # as in ``pack_inputs``
        masks = pack_masks(plan, places, kept.num_rows, self._vocab_size)
        return SampleKept(kept.number, sampling, Need(int(np.bitwise_or.reduce(needs))), masks), places

    def forget_logits(self, plan: NextIterationPlan) -> ForgetLogits | None:
        """Nobody samples any more from the logits that are kept of a plan, if they still are."""
        kept = self._kept.pop(plan, None)
        return None if kept is None else ForgetLogits(kept.number)

    def lose_state(self) -> None:
        """The device has lost the state of all slots."""
        self.lose_logits()
        self._earlier = [()] * len(self._earlier)

    def lose_logits(self) -> None:
        """No logits are kept any more."""
        self._kept.clear()

    def _keep(self, plan: NextIterationPlan, layout: StepLayout) -> KeptRows:
        """Keep the logits of rows that sample late: of all rows, unless these are few."""
        sampler_rows = self._sampler_rows(plan)
        late = {plan.sequences[row]: sampler_rows[row] for row in plan.late}
        spans = [range(sampler_rows[row], sampler_rows[row] + plan.counts[row]) for row in plan.late]
        self._num_kept += 1
        if not sum(map(len, spans)) <= self._few_rows < layout.rows:
            self._kept[plan] = _Kept(self._num_kept, layout.rows, late)
            return KeptRows(self._num_kept, None)
        rows, places = np.zeros(self._few_rows, np.int32), accumulate(map(len, spans), initial=0)
        rows[: sum(map(len, spans))] = list(chain.from_iterable(spans))
        self._kept[plan] = _Kept(self._num_kept, self._few_rows, dict(zip(late, places, strict=False)))
        return KeptRows(self._num_kept, rows)

    def _changes(self, plan: NextIterationPlan) -> SlotChanges:
        """What the device does not know yet of the sequences of a plan."""
        changes = SlotChanges(self._admissions(plan), [], [])
        for sequence in (*plan.grown, *plan.sequences[plan.num_decodes :], *plan.admitted):
            written = self._num_written[sequence.slot]
            for group, table in enumerate(sequence.pages):
                before, count = written[group], len(table)
                if count > before:
                    first = self._shapes.place(group, sequence.slot)
                    changes.places.extend(range(first + before, first + count))
                    changes.pages.extend(table[before:])
                    written[group] = count
        return changes

    def _admissions(self, plan: NextIterationPlan) -> NDArray[np.int32]:
        """Note the sequences that got a slot."""
        if not plan.admitted:
            return NO_ADMISSIONS
        chunks = dict(zip(plan.sequences[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True))
        starts = [sequence.num_computed_tokens - chunks.get(sequence, 0) for sequence in plan.admitted]
        needs = [int(needs_of(sequence)) for sequence in plan.admitted]
        for sequence, need in zip(plan.admitted, needs, strict=True):
            self._needs[sequence.slot] = need
            self._num_written[sequence.slot] = list(sequence.first_pages)
        return admissions(plan.admitted, starts, needs)

    def _write_rows(
        self,
        plan: NextIterationPlan,
        layout: StepLayout,
        packed: NDArray[np.int32],
        slots: NDArray[np.int32],
        samples: NDArray[np.int32],
    ) -> None:
        count = plan.num_rows
        layout.view(packed, "slots")[:count] = slots
        layout.view(packed, "counts")[:count] = plan.counts
        layout.view(packed, "samples")[:count] = samples
        if plan.late:
            layout.view(packed, "samples")[plan.late] = -np.array(plan.counts)[plan.late]
        if layout.has_states:
            layout.view(packed, "state_sources")[:count] = plan.state_sources
            layout.view(packed, "state_slots")[:count] = plan.state_slots
        if layout.has_adapters:
            layout.view(packed, "adapters")[:count] = plan.adapter_slots
        if plan.looks_up:
            layout.view(packed, "looks_up")[:] = 1

    def _has(self, sequence: Sequence, need: Need) -> bool:
        return bool(self._needs[sequence.slot] & need.value)

    def _needed(self, plan: NextIterationPlan, slots: NDArray[np.int32], samples: NDArray[np.int32]) -> Need:
        """What the rows of these slots need: of one that does not sample, the log-probabilities of
        its prompt alone, of one that decodes all but these."""
        needs = self._needs[slots]
        if plan.late or plan.num_decodes < plan.num_rows:
            needs[samples == 0] &= Need.PROMPT_LOGPROBS.value
        needs[: plan.num_decodes] &= SAMPLERS
        return Need(int(np.bitwise_or.reduce(needs)))


def _write_tokens(plan: NextIterationPlan, token_ids: NDArray[np.int32]) -> None:
    at = plan.num_decode_tokens
    token_ids[:at] = FROM_SLOT
    for index in range(plan.num_decodes, plan.num_rows):
        start, count = plan.starts[index], plan.counts[index]
        token_ids[at : at + count] = _known_tokens(plan.sequences[index], start, start + count)
        at += count


def _known_tokens(sequence: Sequence, start: int, end: int) -> ListOf[int]:
    """Tokens ``start .. end - 1`` of the prompt and, after preemption, of the output."""
    prompt = sequence.prompt_token_ids
    if end <= len(prompt):
        return prompt[start:end]
    output = sequence.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)]
    return prompt[start:] + output
