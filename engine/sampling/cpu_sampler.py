"""What a CPU has between logits and tokens, by C++ kernels of our own.

Each is one call, where XLA compiles a hundred loops for seconds.
"""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import DRAW
from engine.sampling.logprobs import num_columns
from engine.sampling.operations import SamplingOperations
from engine.sampling.sampler import SamplingRows
from engine.vocabulary import WHOLE, Vocabulary


@cache
def prepare() -> None:
    """Registers the kernels. Raises KernelsUnavailable."""
    for name in ("odriver_sample", "odriver_logprobs"):
        register(load(DRAW), name)


def sample(logits: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """As ``sampler.sample``, on one device: the same random numbers, and so the same tokens.

    Sums are rounded otherwise: a number within 1e-6 of where two tokens meet may give the other.
    """
    assert vocabulary.axis is None
    call = jax.ffi.ffi_call("odriver_sample", jax.ShapeDtypeStruct((logits.shape[0],), np.int32))
    parameters = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions
    token_ids: Array = call(logits, *parameters, jax.random.key_data(key))
    return token_ids


def compute_logprobs(
    logits: Array, token_ids: Array, vocabulary: Vocabulary = WHOLE, vocab_size: int | None = None
) -> Array:
    """As ``logprobs.compute_logprobs``, on one device, but for how sums are rounded."""
    assert vocabulary.axis is None
    columns = num_columns(vocab_size or logits.shape[1])
    call = jax.ffi.ffi_call("odriver_logprobs", jax.ShapeDtypeStruct((logits.shape[0], columns), np.int32))
    logprobs: Array = call(logits, token_ids)
    return logprobs


CPU_SAMPLING = SamplingOperations(sample, compute_logprobs, has_greedy=False)
