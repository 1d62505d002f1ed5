"""The sampler of a CPU, by a C++ kernel of our own: one call, where XLA compiles a hundred loops for seconds."""

from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import DRAW
from engine.sampling.sampler import SamplingRows
from engine.vocabulary import WHOLE, Vocabulary


@cache
def prepare() -> None:
    """Registers the kernel. Raises KernelsUnavailable."""
    register(load(DRAW), "odriver_sample")


def sample(logits: Array, rows: SamplingRows, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """As ``sampler.sample``, on one device: the same random numbers, and so the same tokens.

    Sums are rounded otherwise: a number within 1e-6 of where two tokens meet may give the other.
    """
    assert vocabulary.axis is None
    call = jax.ffi.ffi_call("odriver_sample", jax.ShapeDtypeStruct((logits.shape[0],), np.int32))
    parameters = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions
    token_ids: Array = call(logits, *parameters, jax.random.key_data(key))
    return token_ids
