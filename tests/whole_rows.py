"""A decoder over whole sequences, without pages or an engine."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from plain_attention import DenseAttention

from engine.models.decoder import Decoder
from engine.models.step_context import StepContext


def compute_logprobs(decoder: Decoder, sequences: list[list[int]]) -> np.ndarray:
    """f32[sequence, position, vocab]; causal attention keeps the padding on the right out of it."""
    length = max(map(len, sequences))
    token_ids = np.array([sequence + [0] * (length - len(sequence)) for sequence in sequences], np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), token_ids.shape)
    return np.asarray(_forward(decoder, jnp.asarray(token_ids), jnp.asarray(positions)))


def whole_rows_of(decoder: Decoder, rows: int, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of hidden states and logits, of weights that may be shapes alone."""
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    shapes: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct] = nnx.eval_shape(_computed, decoder, ids, ids)
    return shapes


@nnx.jit
def _forward(decoder: Decoder, token_ids: Array, positions: Array) -> Array:
    return jax.nn.log_softmax(_computed(decoder, token_ids, positions)[1], axis=-1)


def _computed(decoder: Decoder, token_ids: Array, positions: Array) -> tuple[Array, Array]:
    caches = [None] * len(decoder.partition.model.mixers)
    rotations = decoder.rotations(positions, token_ids.shape[1])
    _, hidden = decoder(token_ids, caches, StepContext(rotations, DenseAttention(keeps=True), positions=positions))
    return hidden, decoder.logits(hidden)
