"""The tokens of a draft head that numbers those that it drafts itself."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.partition import Partition
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import TOKENS, tensors
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


class DraftVocabulary(nnx.Module):
    """Which tokens of a model the numbers of a head stand for, each a different one."""

    def __init__(self, num_tokens: int, partition: Partition, make: ParameterFactory) -> None:
        # As float32, which has all whole numbers up to 2^24.
        self.tokens = make.scale("tokens", {"columns": num_tokens}, tensors(TOKENS))
        self.num_tokens, self._partition = num_tokens, partition

    def token_ids(self, numbers: Array) -> Array:
        """i32[...] of i32[...] numbers; below 0 as it is."""
        return jnp.where(numbers < 0, numbers, self.all_tokens()[jnp.maximum(numbers, 0)])

    def over_vocabulary(self, logits: Array) -> Array:
        """f32[rows, part of the head's numbers] -> f32[rows, part of the vocabulary], of others those
        of no token."""
        partition, vocabulary = self._partition, Vocabulary(self._partition.axis)
        size = partition.padded_vocab_size // partition.devices
        places = vocabulary.place(self.all_tokens(), size)
        drafted = vocabulary.gather(logits)[:, : self.num_tokens]
        none = jnp.full((len(logits), size), NO_TOKEN_LOGIT)
        return none.at[:, places].set(drafted, mode="drop")

    def all_tokens(self) -> Array:
        """i32[num_tokens], by number."""
        numbers = jnp.arange(self.num_tokens, dtype=jnp.int32)
        return numbers + jax.lax.round(self.tokens[...]).astype(np.int32)
