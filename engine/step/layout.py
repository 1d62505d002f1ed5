"""The sizes that steps are compiled for, and where each field of a step lies in its packed array.

Padding is counted as (bucket - tokens) / bucket: the share of a step that is for nothing.

Up to ``max_num_seqs`` a step may be all decodes, the same size step after step, so the sizes lie as close as {4, 5, 6} x 2^k:
less than a quarter of any such step is padding, and powers of two have none. Beyond it a step has a prompt's chunk in it,
and while prompts wait it has the whole budget; only a prompt's last chunk is padded. There {2, 3} x 2^k must do, which
keeps it under a third: every size costs a compilation, of seconds where the model is large.
"""

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
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from engine.sampling.sampler import SamplingRows

PROMPT_BLOCK = 64
"""Prompt tokens whose log-probabilities are computed at once: their logits are what a step has memory for anyway."""
DECODE_MANTISSAS = (4, 5, 6)
CHUNK_MANTISSAS = (2, 3)
SMALLEST = (1, 2, 3)
COVERING_RATIO = 8
"""How much larger than its own bucket the one may be that a step runs in while that is not compiled yet."""
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


@dataclass(frozen=True)
class StepShapes:
    """The sizes that every compiled function has in common."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cache: PagedAttentionCacheMetaData
    smallest_step: int = 1
    """Tokens below which a step takes no less time."""

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return pages_for(self.max_model_len, self.cache.page_size)

    @property
    def buckets(self) -> list[int]:
        """The token counts that are compiled, ascending."""
        return token_buckets(self.max_num_seqs, self.max_num_batched_tokens, self.smallest_step)

    def layout(self, tokens: int) -> StepLayout:
        """The packed array of a bucket."""
        return StepLayout(tokens, sampling_rows(tokens, self.max_num_seqs), self.pages_per_seq)


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, smallest: int = 1) -> list[int]:
    """The token counts of the compiled steps, ascending; the last is the budget.

    ``smallest`` is above 1 where a step of less takes as long, because it is weights that are waited for: there padding
    costs next to nothing, and decoding steps are powers of two.
    """
    most = max(max_num_seqs, smallest)
    closer = {*SMALLEST, *_sizes(DECODE_MANTISSAS, max_num_batched_tokens)}
    decodes = _sizes((1,), max_num_batched_tokens) if smallest > 1 else closer
    chunks = _sizes(CHUNK_MANTISSAS, max_num_batched_tokens)
    kept = {size for size in decodes if smallest <= size <= most} | {most} | {size for size in chunks if size > most}
    return sorted({size for size in kept if size <= max_num_batched_tokens} | {max_num_batched_tokens})


def covering_buckets(buckets: list[int]) -> list[int]:
    """Few of the buckets in which every step can run, ascending: the largest, and from it down one of each magnitude."""
    covering = [buckets[-1]]
    for bucket in reversed(buckets):
        if bucket * COVERING_RATIO <= covering[0]:
            covering.insert(0, bucket)
    return covering


def sampling_rows(tokens: int, max_num_seqs: int) -> int:
    """The rows that the sampler of a bucket has: a power of two, or all.

    Samplers cost seconds to compile too, in several variants, and far less than a step to run: up to half of their
    rows may be padding.
    """
    return min(1 << (tokens - 1).bit_length(), max_num_seqs)


def _sizes(mantissas: tuple[int, ...], largest: int) -> set[int]:
    return {mantissa << exponent for mantissa in mantissas for exponent in range(largest.bit_length())}
