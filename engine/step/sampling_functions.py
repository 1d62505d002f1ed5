"""The compiled functions between logits and tokens, and what they keep on the device for each slot.

A step calls the sampler, and the others only if one of its rows needs them: bias, penalties, masks, sampler, log-probabilities,
in this order. Each is compiled for every number of rows that a bucket has.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.stages import Lowered
from jax.tree_util import GetAttrKey, KeyPath
from numpy.typing import NDArray

from engine.mesh import COPY, LOGITS, TP, DeviceMesh
from engine.sampling.logit_bias import LogitBias, apply_bias, neutral_bias
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.penalties import Penalties, apply_penalties, neutral_penalties
from engine.sampling.sampler import SamplingVariant, sample
from engine.sampling.token_masks import mask_logits, mask_words
from engine.step.lowering import Hear, compile_lowered, hear_nothing, lower
from engine.step.model_io import StepLayout
from engine.vocabulary import Vocabulary, padded_vocab_size

Sample = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(logits, last_token, sampling, key) -> (ids i32[rows], last_token); last_token is donated."""
Bias = Callable[[LogitBias, Array, Array, Array], tuple[LogitBias, Array]]
"""(state, logits, last_token, sampling) -> (state, logits); the state is donated."""
Penalize = Callable[[Penalties, Array, Array, Array], tuple[Penalties, Array]]
"""As Bias."""
Mask = Callable[[Array, NDArray[np.int32]], Array]
"""``mask_logits``."""
Logprobs = Callable[[Array, Array], Array]
"""(logits, ids) -> what ``unpack_logprobs`` reads."""

OVER_VOCABULARY = ("values", "counts")
"""The fields of states that have a number for each token."""

State = TypeVar("State", LogitBias, Penalties)
Write = Callable[[State, np.int32, State], State]
"""(state of all slots, slot, a sequence's) -> state; the state is donated."""


class SamplingFunctions:
    """Compiles ahead of time; executables refuse other shapes than their own."""

    def __init__(self, max_num_seqs: int, num_tokens: int, mesh: DeviceMesh, hear: Hear = hear_nothing) -> None:
        self._num_slots = max_num_seqs + 1
        self._num_tokens = num_tokens
        self._mesh, self._hear = mesh, hear
        self._vocabulary = Vocabulary(mesh.axis)
        self.vocab_size = vocab_size = padded_vocab_size(num_tokens, mesh.size)
        """Columns of logits; those past the model's own are drawn by nobody."""
        self._sample: dict[tuple[int, SamplingVariant], Sample] = {}
        self._bias: dict[int, Bias] = {}
        self._penalize: dict[int, Penalize] = {}
        self._mask: dict[int, Mask] = {}
        self._logprobs: dict[int, Logprobs] = {}
        self.new_bias = self._maker(neutral_bias(vocab_size))
        """The state of all slots, which changes nothing yet."""
        self.new_penalties = self._maker(neutral_penalties(vocab_size))
        """The state of all slots, which penalises nothing yet."""
        self.write_bias = self._writer(neutral_bias(vocab_size))
        self.write_penalties = self._writer(neutral_penalties(vocab_size))

    def sampler(self, layout: StepLayout, variant: SamplingVariant) -> Sample:
        """Draws a token for each of a bucket's rows."""
        return self._sample[layout.rows, variant]

    def bias(self, layout: StepLayout) -> Bias:
        """Applies LogitBias to a bucket's rows."""
        return self._bias[layout.rows]

    def penalize(self, layout: StepLayout) -> Penalize:
        """Applies Penalties to a bucket's rows."""
        return self._penalize[layout.rows]

    def mask(self, layout: StepLayout) -> Mask:
        """Applies the masks of constraints to a bucket's rows."""
        return self._mask[layout.rows]

    def logprobs(self, layout: StepLayout) -> Logprobs:
        """Finds the log-probabilities of the tokens drawn for a bucket's rows."""
        return self._logprobs[layout.rows]

    def is_compiled(self, layout: StepLayout) -> bool:
        """Whether all functions are there for a bucket."""
        return all((layout.rows, variant) in self._sample for variant in SamplingVariant) and all(
            layout.rows in functions for functions in (self._bias, self._penalize, self._mask, self._logprobs)
        )

    def jobs(self, layout: StepLayout) -> Iterator[Callable[[], None]]:
        """What is not compiled for a bucket, each to be called, on whatever thread."""
        for variant in SamplingVariant:
            if (layout.rows, variant) not in self._sample:
                yield partial(self._compile_sampler, layout, variant)
        for functions, job in (
            (self._bias, self._compile_bias),
            (self._penalize, self._compile_penalize),
            (self._mask, self._compile_mask),
            (self._logprobs, self._compile_logprobs),
        ):
            if layout.rows not in functions:
                yield partial(job, layout)

    def _compile_sampler(self, layout: StepLayout, variant: SamplingVariant) -> None:
        def draw(logits: Array, last_token: Array, sampling: Array, key: Array) -> tuple[Array, Array]:
            slots, rows = layout.unpack_sampling(sampling)
            token_ids = sample(logits, rows, key, variant, self._vocabulary)
            return token_ids, last_token.at[slots].set(jnp.maximum(token_ids, 0))  # NO_TOKEN is no row to look up

        key = self._mesh.shapes(jax.eval_shape(lambda: jax.random.key(0)))
        on_each = self._mesh.on_each(draw, (LOGITS, COPY, COPY, COPY), COPY)
        lowered = lower(on_each, *self._arguments(layout), key, donate=1)
        self._sample[layout.rows, variant] = compile_lowered(lowered, variant.value, layout.rows, self._hear)

    def _compile_bias(self, layout: StepLayout) -> None:
        def bias(state: LogitBias, logits: Array, last_token: Array, sampling: Array) -> tuple[LogitBias, Array]:
            slots, num_tokens = layout.take(sampling, "bias_slots"), layout.take(sampling, "kv_lens")
            return apply_bias(logits, state, slots, last_token, num_tokens, self._vocabulary)

        lowered = self._lower_change(bias, neutral_bias(self.vocab_size), layout)
        self._bias[layout.rows] = compile_lowered(lowered, "bias", layout.rows, self._hear)

    def _compile_penalize(self, layout: StepLayout) -> None:
        def penalize(state: Penalties, logits: Array, last_token: Array, sampling: Array) -> tuple[Penalties, Array]:
            slots, num_tokens = layout.take(sampling, "penalty_slots"), layout.take(sampling, "kv_lens")
            return apply_penalties(logits, state, slots, last_token, num_tokens, self._vocabulary)

        lowered = self._lower_change(penalize, neutral_penalties(self.vocab_size), layout)
        self._penalize[layout.rows] = compile_lowered(lowered, "penalties", layout.rows, self._hear)

    def _compile_mask(self, layout: StepLayout) -> None:
        masks = self._mesh.shapes(jax.ShapeDtypeStruct((layout.rows, mask_words(self.vocab_size)), np.int32))
        on_each = self._mesh.on_each(partial(mask_logits, vocabulary=self._vocabulary), (LOGITS, COPY), LOGITS)
        lowered = lower(on_each, self._arguments(layout)[0], masks)
        self._mask[layout.rows] = compile_lowered(lowered, "mask", layout.rows, self._hear)

    def _compile_logprobs(self, layout: StepLayout) -> None:
        logits, token_ids = self._arguments(layout)[0], jax.ShapeDtypeStruct((layout.rows,), np.int32)
        compute = partial(compute_logprobs, vocabulary=self._vocabulary, vocab_size=self._num_tokens)
        on_each = self._mesh.on_each(compute, (LOGITS, COPY), COPY)
        lowered = lower(on_each, logits, self._mesh.shapes(token_ids))
        self._logprobs[layout.rows] = compile_lowered(lowered, "logprobs", layout.rows, self._hear)

    def _lower_change(self, change: Callable[..., Any], row: State, layout: StepLayout) -> Lowered:
        """A function of a state, donated, and logits that gives both."""
        specs = _specs(row, None)
        on_each = self._mesh.on_each(change, (specs, LOGITS, COPY, COPY), (specs, LOGITS))
        return lower(on_each, self._abstract(row), *self._arguments(layout), donate=0)

    def _writer(self, row: State) -> Write[State]:
        def write(state: State, slot: Array, row: State) -> State:
            written: State = jax.tree.map(lambda slots, value: slots.at[slot].set(value), state, row)
            return written

        specs, of_one = _specs(row, None), _specs(row)
        slot = self._mesh.shapes(jax.ShapeDtypeStruct((), np.int32))
        row = jax.tree.map(lambda leaf, spec: self._mesh.shapes(leaf, *spec), row, of_one)
        on_each = self._mesh.on_each(write, (specs, COPY, of_one), specs)
        lowered = lower(on_each, self._abstract(row), slot, row, donate=0)
        writer: Write[State] = compile_lowered(lowered, "write", self._num_slots, self._hear)
        return lambda state, slot, row: writer(state, slot, self._mesh.place(row, of_one))

    def _arguments(self, layout: StepLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Logits, last tokens and what the sampler reads of the packed array."""
        logits = jax.ShapeDtypeStruct((layout.rows, self.vocab_size), jnp.float32)
        last_token = jax.ShapeDtypeStruct((self._num_slots,), np.int32)
        sampling = jax.ShapeDtypeStruct((layout.sampling_size,), np.int32)
        return self._mesh.shapes(logits, *LOGITS), self._mesh.shapes(last_token), self._mesh.shapes(sampling)

    def _maker(self, row: State) -> Callable[[], State]:
        """Makes the state of all slots, each like this row."""

        def make(leaf: NDArray[Any], spec: PartitionSpec) -> Callable[[], Array]:
            return self._mesh.maker(partial(jnp.tile, leaf, (self._num_slots, *(1 for _ in leaf.shape))), *spec)

        makers = jax.tree.map(make, row, _specs(row, None))
        return lambda: jax.tree.map(lambda make: make(), makers)

    def _abstract(self, row: State) -> State:
        """The shapes of the state of all slots."""

        def shape(leaf: NDArray[Any], spec: PartitionSpec) -> Any:
            return self._mesh.shapes(jax.ShapeDtypeStruct((self._num_slots, *leaf.shape), leaf.dtype), *spec)

        state: State = jax.tree.map(shape, row, _specs(row, None))
        return state


def _specs(row: State, *lead: None) -> Any:
    """How each field of a state is split: along the vocabulary, where it has a number for each token."""

    def spec(path: KeyPath[Any], _: NDArray[Any]) -> PartitionSpec:
        assert isinstance(path[-1], GetAttrKey)
        return PartitionSpec(*lead, TP) if path[-1].name in OVER_VOCABULARY else COPY

    return jax.tree_util.tree_map_with_path(spec, row)
