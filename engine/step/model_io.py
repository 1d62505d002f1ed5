"""Between a plan and the device: one packed i32 array in, one array of ids out."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.attention.spec import PageTable
from engine.sampling.sampler import SamplingRows
from engine.sampling.sampling_metadata import ModelRunnerSamplingMetadata, Need, PromptLogprobs
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.step.sequence_buffer import SequenceBuffer

FROM_SLOT = -1
"""In place of a token id: the token that the row's slot sampled last, which only the device may know yet."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputBatch:
    """A step as the model sees it: T tokens of at most ``rows`` sequences, of which there are no more than tokens."""

    token_ids: Array
    """i32[T]; FROM_SLOT in decoding rows, which are the first tokens."""
    positions: Array
    """i32[T] of each token in its sequence; 0 in padding."""
    slots: Array
    """i32[rows] where a row's last token is kept; the dump slot where a row samples nothing worth keeping."""
    table: PageTable


@dataclass(frozen=True)
class StepLayout:
    """Where each field of a step lies in the packed array, for ``tokens`` tokens and ``rows`` rows of the sampler.

    What the sampler reads comes first and depends on ``rows`` alone, so that buckets with as many rows share samplers.
    The model has no rows beyond its tokens.
    """

    tokens: int
    rows: int
    pages_per_seq: int

    @property
    def model_rows(self) -> int:
        """Rows that the model makes logits for; those that the sampler has beyond them are padding."""
        return min(self.tokens, self.rows)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Offset and shape by name; every field is four bytes an entry."""
        tokens, rows = (self.tokens,), (self.rows,)
        shapes: dict[str, tuple[int, ...]] = {
            "slots": rows,
            "bias_slots": rows,
            "penalty_slots": rows,
            "kv_lens": rows,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
            "seeds": rows,
            "token_ids": tokens,
            "positions": tokens,
            "page_indices": (self.model_rows, self.pages_per_seq),
            "cu_q_lens": (self.model_rows + 1,),
            "num_seqs": (1,),
        }
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @cached_property
    def size(self) -> int:
        """Entries of the packed array."""
        offset, shape = self.fields["num_seqs"]
        return offset + math.prod(shape)

    @cached_property
    def _spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        return {name: (slice(at, at + math.prod(shape)), shape) for name, (at, shape) in self.fields.items()}

    @property
    def sampling_size(self) -> int:
        """Entries of the part that the sampler reads."""
        return self.fields["token_ids"][0]

    def view(self, packed: NDArray[np.int32], name: str, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
        """A field of the packed array on the host, writable."""
        span, shape = self._spans[name]
        field = packed[span] if len(shape) == 1 else packed[span].reshape(shape)
        return field if dtype is np.int32 else field.view(dtype)

    def take(self, packed: Array, name: str, dtype: type[np.generic] = np.int32) -> Array:
        """A field of the packed array on the device."""
        offset, shape = self.fields[name]
        field = packed[offset : offset + math.prod(shape)].reshape(shape)
        return field if dtype is np.int32 else jax.lax.bitcast_convert_type(field, jnp.dtype(dtype))

    def unpack(self, packed: Array) -> ModelInputBatch:
        """What the model reads, inside a compiled function."""
        return ModelInputBatch(
            token_ids=self.take(packed, "token_ids"),
            positions=self.take(packed, "positions"),
            slots=self.take(packed, "slots")[: self.model_rows],
            table=PageTable(
                kv_lens=self.take(packed, "kv_lens")[: self.model_rows],
                page_indices=self.take(packed, "page_indices"),
                cu_q_lens=self.take(packed, "cu_q_lens"),
                num_seqs=self.take(packed, "num_seqs"),
            ),
        )

    def unpack_sampling(self, packed: Array) -> tuple[Array, SamplingRows]:
        """What the sampler reads of the first ``sampling_size`` entries: the slots to keep tokens in, and parameters."""
        rows = SamplingRows(
            temperature=self.take(packed, "temperature", np.float32),
            top_k=self.take(packed, "top_k"),
            top_p=self.take(packed, "top_p", np.float32),
            min_p=self.take(packed, "min_p", np.float32),
            seeds=self.take(packed, "seeds", np.uint32),
            # The place of the token to be drawn: its sequence's tokens so far are 0..kv_len-1.
            positions=self.take(packed, "kv_lens"),
        )
        return self.take(packed, "slots"), rows


class ModelIOProcessor:
    """Keeps a SequenceBuffer in step with the plans and writes each plan out as the packed array."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, pages_per_seq: int) -> None:
        self._buffer = SequenceBuffer(max_num_seqs, max_model_len, pages_per_seq)
        self._dump_slot = max_num_seqs

    def prepare(
        self, plan: NextIterationPlan, layout: StepLayout
    ) -> tuple[NDArray[np.int32], ModelRunnerSamplingMetadata]:
        """The packed array of a plan, freshly made as the device may go on reading it, and what the sampler is to do."""
        self._follow(plan)
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
        return packed, ModelRunnerSamplingMetadata(
            needs=needed,
            to_bias=self._admitted(plan, Need.BIAS),
            to_penalize=self._admitted(plan, Need.PENALTIES),
            prompt_logprobs=_prompt_logprobs(plan) if needed & Need.PROMPT_LOGPROBS else [],
        )

    def _follow(self, plan: NextIterationPlan) -> None:
        for sequence in plan.released:
            self._buffer.remove(sequence)
        if plan.released:
            self._buffer.condense()
        for sequence in plan.admitted:
            self._buffer.add(sequence)
        self._buffer.add_pages(plan.grown)

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
        width = self._buffer.num_pages[rows].max()  # the whole table of a long context takes milliseconds to copy
        layout.view(packed, "page_indices")[:count, :width] = self._buffer.page_indices[rows, :width]
        ends = layout.view(packed, "cu_q_lens")
        ends[1 : count + 1] = np.cumsum(plan.counts)
        ends[count + 1 :] = plan.num_tokens
        layout.view(packed, "num_seqs")[0] = count

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
    """For each row that is to give some: a token's come from the logits of the one before it."""
    asked, at = [], plan.num_decodes
    for row in range(plan.num_decodes, plan.num_rows):
        sequence, start, count = plan.sequences[row], plan.starts[row], plan.counts[row]
        last = min(start + count, len(sequence.prompt_token_ids) - 1)
        if sequence.params.prompt_logprobs is not None and last > start:
            asked.append(PromptLogprobs(row, start + 1, last - start, at))
        at += count
    return asked
