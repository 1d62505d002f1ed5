"""Converts a plan to a StepDescription: a packed i32 array, and extras of some of its rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_bias import bias_of
from engine.sampling.needs import Need
from engine.sampling.penalties import penalties_of
from engine.sampling.token_masks import pack_masks
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.step.commands import StepDescription
from engine.step.layout import FROM_SLOT, PROMPT_BLOCK, StepLayout
from engine.step.sequence_buffer import SequenceBuffer


@dataclass(frozen=True)
class PromptLogprobs:
    """Prompt tokens ``first .. first + count - 1`` of a row, whose logprobs a step computes."""

    row: int
    first: int
    count: int
    start: int
    """Flat-batch index of the token before ``first``."""


class ModelIOProcessor:
    """Keeps a SequenceBuffer in sync with the plans; converts each to a StepDescription."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, pages_per_seq: int, vocab_size: int, num_groups: int = 1
    ) -> None:
        self._buffer = SequenceBuffer(max_num_seqs, max_model_len, pages_per_seq, num_groups)
        self._dump_slot = max_num_seqs
        self._vocab_size = vocab_size

    def prepare(self, plan: NextIterationPlan, layout: StepLayout) -> tuple[StepDescription, list[PromptLogprobs]]:
        """A plan in a bucket, and the prompt tokens whose logprobs it computes, in order.

        All arrays are new, because the device may still read the earlier ones.
        """
        self._follow(plan, layout)
        packed = np.zeros(layout.size, np.int32)
        rows = self._buffer.rows_of(plan.sequences)
        samples = np.array(plan.samples)
        needs = self._buffer.needs[rows]
        needs[~samples] &= Need.PROMPT_LOGPROBS
        needs[: plan.num_decodes] &= ~Need.PROMPT_LOGPROBS
        self._write_tokens(plan, layout, packed, rows)
        self._write_rows(plan, layout, packed, rows)
        self._write_slots(layout, packed, rows, samples, needs)
        needed = Need(int(np.bitwise_or.reduce(needs)))
        if needed & Need.DRAW:
            self._write_sampling(layout, packed, rows)
        prompt_logprobs = _prompt_logprobs(plan) if needed & Need.PROMPT_LOGPROBS else []
        return StepDescription(
            layout.tokens,
            packed,
            needed,
            [(each.slot, bias_of(each, self._vocab_size)) for each in self._admitted(plan, Need.BIAS)],
            [(each.slot, penalties_of(each, self._vocab_size)) for each in self._admitted(plan, Need.PENALTIES)],
            pack_masks(plan, layout.rows, self._vocab_size) if plan.constrained else None,
            _prompt_tokens(plan, prompt_logprobs) if prompt_logprobs else None,
        ), prompt_logprobs

    def _follow(self, plan: NextIterationPlan, layout: StepLayout) -> None:
        for sequence in plan.released:
            self._buffer.remove(sequence)
        if plan.released:
            self._buffer.condense()
        for sequence in plan.admitted:
            self._buffer.add(sequence)
        self._buffer.add_pages(plan.grown)
        if layout.windowed:
            self._buffer.move_windows(plan.sequences[plan.num_decodes :], layout.windowed)

    def _write_tokens(
        self, plan: NextIterationPlan, layout: StepLayout, packed: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> None:
        token_ids, positions = layout.view(packed, "token_ids"), layout.view(packed, "positions")
        decodes = plan.num_decodes
        token_ids[:decodes] = FROM_SLOT
        positions[:decodes] = plan.starts[:decodes]
        at = decodes
        for index in range(decodes, plan.num_rows):
            start, count = plan.starts[index], plan.counts[index]
            token_ids[at : at + count] = self._buffer.token_ids[rows[index], start : start + count]
            positions[at : at + count] = np.arange(start, start + count)
            at += count

    def _write_rows(
        self, plan: NextIterationPlan, layout: StepLayout, packed: NDArray[np.int32], rows: NDArray[np.intp]
    ) -> None:
        count = plan.num_rows
        layout.view(packed, "kv_lens")[:count] = np.add(plan.starts, plan.counts)
        self._write_tables(layout, packed, rows)
        ends = layout.view(packed, "cu_q_lens")
        ends[1 : count + 1] = np.cumsum(plan.counts)
        ends[count + 1 :] = plan.num_tokens
        layout.view(packed, "num_seqs")[0] = count

    def _write_tables(self, layout: StepLayout, packed: NDArray[np.int32], rows: NDArray[np.intp]) -> None:
        tables, count = layout.view(packed, "page_indices"), len(rows)
        longest = self._buffer.num_pages[rows].max()  # copying the full width can take ms
        for group, columns in enumerate(layout.table_columns):
            if group not in layout.windowed:
                tables[:count, columns][:, :longest] = self._buffer.page_indices[group, rows, :longest]
        for number, group in enumerate(layout.windowed):
            firsts, part = self._buffer.first_pages[group, rows], tables[:count, layout.table_columns[group]]
            places = np.minimum(firsts[:, None] + np.arange(part.shape[1]), layout.pages_per_seq - 1)
            part[:] = self._buffer.page_indices[group, rows[:, None], places]
            layout.view(packed, "first_pages")[:count, number] = firsts

    def _write_slots(
        self,
        layout: StepLayout,
        packed: NDArray[np.int32],
        rows: NDArray[np.intp],
        samples: NDArray[np.bool_],
        needs: NDArray[np.int32],
    ) -> None:
        slots, count = self._buffer.slots[rows], len(rows)
        for name, where in (
            ("slots", samples), ("bias_slots", needs & Need.BIAS), ("penalty_slots", needs & Need.PENALTIES)
        ):  # fmt: skip
            field = layout.view(packed, name)
            field[:count] = np.where(where, slots, self._dump_slot)
            field[count:] = self._dump_slot

    def _write_sampling(self, layout: StepLayout, packed: NDArray[np.int32], rows: NDArray[np.intp]) -> None:
        buffer, count = self._buffer, len(rows)
        layout.view(packed, "temperature", np.float32)[:count] = buffer.temperature[rows]
        layout.view(packed, "top_k")[:count] = buffer.top_k[rows]
        layout.view(packed, "top_p", np.float32)[:count] = buffer.top_p[rows]
        layout.view(packed, "min_p", np.float32)[:count] = buffer.min_p[rows]
        layout.view(packed, "seeds", np.uint32)[:count] = buffer.seeds[rows]

    def _admitted(self, plan: NextIterationPlan, need: Need) -> list[Sequence]:
        return [sequence for sequence in plan.admitted if self._buffer.needs[self._buffer.row_of(sequence)] & need]


def _prompt_logprobs(plan: NextIterationPlan) -> list[PromptLogprobs]:
    """For each row that wants some. The previous token's logits give a token's logprobs."""
    asked, at = [], plan.num_decodes
    for row in range(plan.num_decodes, plan.num_rows):
        sequence, start, count = plan.sequences[row], plan.starts[row], plan.counts[row]
        last = min(start + count, len(sequence.prompt_token_ids) - 1)
        if sequence.params.prompt_logprobs is not None and last > start:
            asked.append(PromptLogprobs(row, start + 1, last - start, at))
        at += count
    return asked


def _prompt_tokens(plan: NextIterationPlan, asked: list[PromptLogprobs]) -> NDArray[np.int32]:
    """i32[blocks, 2, PROMPT_BLOCK] of indices and targets; the last block is padded."""
    places = np.concatenate([np.arange(one.start, one.start + one.count) for one in asked])
    targets = np.concatenate(
        [plan.sequences[one.row].prompt_token_ids[one.first : one.first + one.count] for one in asked]
    )
    flat = np.zeros((2, -(-len(places) // PROMPT_BLOCK) * PROMPT_BLOCK), np.int32)
    flat[:, : len(places)] = places, targets
    return np.ascontiguousarray(flat.reshape(2, -1, PROMPT_BLOCK).swapaxes(0, 1))
