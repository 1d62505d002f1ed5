"""Logprobs of sampled and prompt tokens, and of the likeliest beside them, from raw logits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.request_limits import MAX_LOGPROBS
from engine.sampling.row_blocks import copied_in_blocks, highest, top, total
from engine.scheduling.sequence import TokenLogprobs
from engine.vocabulary import WHOLE, Vocabulary


def compute_logprobs(
    logits: Array, token_ids: Array, vocabulary: Vocabulary = WHOLE, vocab_size: int | None = None
) -> Array:
    """Logprobs of i32[rows] tokens in logits f32[rows, vocab], for ``unpack_logprobs``.

    Returns i32[rows, 2 + 2 * n]: the bits of each token's f32 logprob, its rank, then ids and
    logprob bits of the n likeliest. One array is one copy to the host. n is MAX_LOGPROBS, or
    ``vocab_size`` if that is smaller; the logits may be padded beyond it. By default they aren't.
    """
    blocks = copied_in_blocks(logits)
    best = vocabulary.max(highest(blocks))[:, None]
    weights = jnp.sum(total(jnp.exp(blocks - best[..., None])), axis=-1, keepdims=True)
    normalizer = best + jnp.log(vocabulary.total(weights))
    chosen = vocabulary.take(logits, token_ids)[:, None]
    rank = 1 + vocabulary.total(jnp.sum((logits > chosen).astype(jnp.int32), axis=-1, keepdims=True))
    likeliest, ids = top(blocks, _num_likeliest(vocab_size or logits.shape[-1]), vocabulary)
    return jnp.concatenate([_bits(chosen - normalizer), rank, ids, _bits(likeliest - normalizer)], axis=1)


def num_columns(vocab_size: int) -> int:
    """Those of what ``compute_logprobs`` returns."""
    return 2 + 2 * _num_likeliest(vocab_size)


def unpack_logprobs(row: NDArray[np.int32], token_id: int, count: int) -> TokenLogprobs:
    """One row i32[2 + 2 * n] of ``compute_logprobs``: its token and the ``count`` likeliest."""
    width = (len(row) - 2) // 2
    count = min(count, width)
    top = row[2 + width : 2 + width + count].view(np.float32)
    return TokenLogprobs(
        token_ids=[token_id, *row[2 : 2 + count].tolist()],
        logprobs=[float(row[:1].view(np.float32)[0]), *top.tolist()],
        ranks=[int(row[1]), *range(1, count + 1)],
    )


def _num_likeliest(vocab_size: int) -> int:
    return min(MAX_LOGPROBS, vocab_size)


def _bits(values: Array) -> Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)
