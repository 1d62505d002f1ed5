"""What a CPU has between logits and tokens, by C++ kernels of our own.

Each is one call, where XLA compiles a hundred loops for seconds. They change the state of slots
where it is, of which XLA copies what it reads and writes.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
from jax import Array

from caching.cpu_kernels import load, register
from engine.cpu_libraries import DRAW
from engine.sampling.logit_bias import LogitBias
from engine.sampling.logprobs import num_columns
from engine.sampling.needs import Need
from engine.sampling.operations import Fed, SamplingOperations, State
from engine.sampling.penalties import Penalties
from engine.sampling.sampler_inputs import SamplerInputs
from engine.speculation.history import History
from engine.vocabulary import WHOLE, Vocabulary


@cache
def prepare() -> None:
    """Registers the kernels. Raises KernelsUnavailable."""
    for name in ("sample", "draw", "logprobs", "bias", "penalties", "mask", "write_slot"):
        register(load(DRAW), f"odriver_{name}")


def sample(logits: Array, inputs: SamplerInputs, key: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """As ``operations.sample``, on one device, for rows that sample: the same random numbers, and so the
    same tokens. Others have NO_TOKEN.

    Sums are rounded otherwise: a number within 1e-6 of where two tokens meet may give the other.
    """
    assert vocabulary.axis is None
    call = jax.ffi.ffi_call("odriver_sample", jax.ShapeDtypeStruct((logits.shape[0],), np.int32))
    token_ids: Array = call(logits, inputs.packed, jax.random.key_data(key))
    return token_ids


def draw(
    logits: Array, inputs: SamplerInputs, last_token: Array, key: Array, vocabulary: Vocabulary = WHOLE
) -> tuple[Array, Array]:
    """As ``operations.draw``, but for the dump slot's last token, by what ``sample`` draws."""
    assert vocabulary.axis is None
    shapes = jax.ShapeDtypeStruct((logits.shape[0],), np.int32), _shape(last_token)
    call = jax.ffi.ffi_call("odriver_draw", shapes, input_output_aliases={2: 1})
    token_ids, last_token = call(logits, inputs.packed, last_token, jax.random.key_data(key))
    return token_ids, last_token


def compute_logprobs(
    logits: Array, token_ids: Array, vocabulary: Vocabulary = WHOLE, vocab_size: int | None = None
) -> Array:
    """As ``logprobs.compute_logprobs``, on one device, but for how sums are rounded."""
    assert vocabulary.axis is None
    columns = num_columns(vocab_size or logits.shape[1])
    call = jax.ffi.ffi_call("odriver_logprobs", jax.ShapeDtypeStruct((logits.shape[0], columns), np.int32))
    logprobs: Array = call(logits, token_ids)
    return logprobs


def apply_bias(
    logits: Array, state: LogitBias, inputs: SamplerInputs, fed: Fed, vocabulary: Vocabulary = WHOLE
) -> tuple[LogitBias, Array]:
    """As ``operations.apply_bias``, on one device, but for the state of the dump slot, which stays."""
    assert vocabulary.axis is None
    shapes = _shape(state.recent), _shape(logits)
    call = jax.ffi.ffi_call("odriver_bias", shapes, input_output_aliases={3: 0})
    of_slots = state.values, state.recent, state.banned_ids, state.banned_after, state.hidden_ids, state.hidden_until
    recent, biased = call(logits, inputs.packed, *of_slots, *_arrays(fed), need=np.int64(Need.BIAS))
    return replace(state, recent=recent), biased


def apply_penalties(
    logits: Array, state: Penalties, inputs: SamplerInputs, fed: Fed, vocabulary: Vocabulary = WHOLE
) -> tuple[Penalties, Array]:
    """As ``operations.apply_penalties``, on one device, but for the state of the dump slot, which stays.

    A product of frequency and count is rounded before it is subtracted, whatever rows there are,
    which XLA may leave out: the last bit of such a logit may be another.
    """
    assert vocabulary.axis is None
    shapes = _shape(state.counts), _shape(logits)
    call = jax.ffi.ffi_call("odriver_penalties", shapes, input_output_aliases={2: 0})
    of_slots = state.counts, state.presence, state.frequency, state.repetition
    counts, penalized = call(logits, inputs.packed, *of_slots, *_arrays(fed), need=np.int64(Need.PENALTIES))
    return replace(state, counts=counts), penalized


def mask_logits(logits: Array, masks: Array, vocabulary: Vocabulary = WHOLE) -> Array:
    """As ``token_masks.mask_logits``, on one device."""
    assert vocabulary.axis is None
    masked: Array = jax.ffi.ffi_call("odriver_mask", _shape(logits))(logits, masks)
    return masked


def write_slot(state: State, slot: Array, row: State) -> State:
    """As ``operations.write_slot``."""
    arrays = jax.tree.leaves(state)
    aliases = {number: number for number in range(len(arrays))}
    call = jax.ffi.ffi_call("odriver_write_slot", [_shape(array) for array in arrays], input_output_aliases=aliases)
    written = call(*arrays, slot, *jax.tree.leaves(row), arrays=np.int64(len(arrays)))
    of_all: State = jax.tree.unflatten(jax.tree.structure(state), written)
    return of_all


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _arrays(fed: Fed) -> tuple[Array, ...]:
    """Those of which a step's new tokens are read."""
    return (fed.ids, fed.num_new) if isinstance(fed, History) else (fed,)


CPU_SAMPLING = SamplingOperations(
    sample, draw, compute_logprobs, apply_bias, apply_penalties, mask_logits, write_slot,
    has_greedy=False, copies_counts=False,
)  # fmt: skip
