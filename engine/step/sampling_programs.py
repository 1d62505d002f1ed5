"""The programs between logits and tokens, and their device state per slot.

A step runs one sampler, and the others only if a row needs them, in this order: bias, penalties,
mask, sampler, log-probabilities. Each is compiled for every row count that a bucket has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.stages import Lowered
from jax.tree_util import GetAttrKey, KeyPath
from numpy.typing import NDArray

from engine.devices.mesh import COPY, LOGITS, TP, DeviceMesh
from engine.sampling.logit_bias import neutral_bias
from engine.sampling.needs import Need
from engine.sampling.operations import XLA_SAMPLING, Change, Fed, SamplingOperations, State, kept
from engine.sampling.penalties import neutral_penalties
from engine.sampling.sampler import greedy
from engine.sampling.sampler_inputs import SamplerInputs, num_fields
from engine.sampling.token_masks import mask_words
from engine.speculation.drafter import drafter_of
from engine.speculation.history import History
from engine.speculation.speculative_config import SpeculativeConfig
from engine.speculation.verification import Verify, verify
from engine.step.compilation import Program, lower
from engine.step.inputs.layout import StepLayout
from engine.step.inputs.slot_state import SlotShapes
from engine.vocabulary import Vocabulary, padded_vocab_size

GREEDY, DRAW = "greedy", "draw"
"""(logits, fed, sampling, key) -> (ids i32[rows], fed), or with drafts i32[2, rows] as ``verify``
gives it; ``fed``, which SlotShapes.new_fed made, is donated.
GREEDY is for steps without draws, where the backend has it."""
BIAS, PENALTIES = "bias", "penalties"
"""(state, logits, fed, sampling) -> (state, logits); the state is donated."""
MASK = "mask"
"""``operations.mask_logits``."""
TAKE_LOGITS = "take logits"
"""(logits, rows i32[n]) -> logits f32[n, vocab], of few rows."""
LOGPROBS = "logprobs"
"""(logits, what the sampler gave) -> the input of ``unpack_logprobs``."""
WRITE_BIAS, WRITE_PENALTIES = "write bias", "write penalties"
"""(state of all slots, slot, state of a sequence) -> state; the state is donated."""

OVER_VOCABULARY = ("values", "counts")
"""The state fields that have one entry per token."""
LOGITS_AT_ONCE = 3
"""Arrays as large as a step's logits that are there at once, at most: these, which LOGPROBS reads in
the end, what BIAS made of them, and what PENALTIES makes of that."""


def sampling_bytes(
    max_num_seqs: int, num_rows: int, num_tokens: int, devices: int, operations: SamplingOperations
) -> int:
    """Bytes on each device of the state of all slots, and of what sampling for rows takes beside it."""
    part = padded_vocab_size(num_tokens, devices) // devices
    penalties = neutral_penalties(part)
    slot: int = sum(leaf.nbytes for leaf in jax.tree.leaves((neutral_bias(part), penalties)))
    logits = LOGITS_AT_ONCE * num_rows * part * np.dtype(np.float32).itemsize
    copied = (max_num_seqs + 1 + num_rows) * penalties.counts.nbytes if operations.copies_counts else 0
    return (max_num_seqs + 1) * slot + logits + copied


class SamplingPrograms:
    """Programs that sample from logits of ``num_tokens`` columns and padding, not compiled yet."""

    def __init__(
        self,
        slots: SlotShapes,
        num_tokens: int,
        mesh: DeviceMesh,
        speculation: SpeculativeConfig | None = None,
        operations: SamplingOperations = XLA_SAMPLING,
        verify: Verify = verify,
    ) -> None:
        self._num_slots = slots.num_slots
        self._fed: Fed = mesh.shapes(jax.eval_shape(slots.new_fed))
        self._drafter = None if speculation is None else drafter_of(speculation)
        self._num_tokens, self._operations, self._verify = num_tokens, operations, verify
        self._mesh = mesh
        self._vocabulary = Vocabulary(mesh.axis)
        self.vocab_size = vocab_size = padded_vocab_size(num_tokens, mesh.size)
        """Columns of logits. Those beyond the model's vocabulary are never drawn."""
        self.new_bias = self._maker(neutral_bias(vocab_size))
        """Creates the neutral bias state of all slots."""
        self.new_penalties = self._maker(neutral_penalties(vocab_size))
        """Creates the neutral penalty state of all slots."""

    def of(self, layout: StepLayout) -> list[Program]:
        """The programs that a bucket's rows may need."""
        lowerings: dict[str, Callable[[StepLayout], Lowered]] = {
            DRAW: partial(self._lower_sampler, draws=True),
            BIAS: self._lower_bias,
            PENALTIES: self._lower_penalties,
            MASK: self._lower_mask,
            LOGPROBS: self._lower_logprobs,
        }
        if self._operations.has_greedy:
            lowerings[GREEDY] = partial(self._lower_sampler, draws=False)
        return [Program(name, layout.rows, partial(lowering, layout)) for name, lowering in lowerings.items()]

    def sampler(self, needs: Need) -> str:
        """DRAW or GREEDY, for a step whose rows have these needs."""
        return DRAW if Need.DRAW in needs or not self._operations.has_greedy else GREEDY

    def take_logits(self, layout: StepLayout, count: int) -> Program:
        """TAKE_LOGITS of ``count`` of a bucket's rows."""
        return Program(TAKE_LOGITS, layout.rows, partial(self._lower_take_logits, layout, count))

    def writers(self) -> list[Program]:
        """The programs that write the state of a newly admitted sequence into its slot."""
        return [
            Program(WRITE_BIAS, self._num_slots, partial(self._lower_writer, neutral_bias)),
            Program(WRITE_PENALTIES, self._num_slots, partial(self._lower_writer, neutral_penalties)),
        ]

    def place(self, row: State) -> State:
        """One sequence's state as global arrays, for the writers."""
        placed: State = self._mesh.place(row, _specs(row))
        return placed

    def _lower_sampler(self, layout: StepLayout, *, draws: bool) -> Lowered:
        def draw(logits: Array, fed: Fed, sampling: Array, key: Array) -> tuple[Array, Fed]:
            inputs, vocabulary = SamplerInputs.unpack(sampling, self._num_slots), self._vocabulary
            if isinstance(fed, History):
                assert self._drafter is not None
                sample = partial(self._operations.sample, inputs=inputs, key=key) if draws else greedy
                return self._verify(sample(logits, vocabulary=vocabulary), inputs, fed, self._drafter)
            if draws:
                return self._operations.draw(logits, inputs, fed, key, vocabulary)
            token_ids = greedy(logits, vocabulary)
            return token_ids, kept(token_ids, inputs, fed)

        key = self._mesh.shapes(jax.eval_shape(lambda: jax.random.key(0)))
        on_each = self._mesh.on_each(draw, (LOGITS, COPY, COPY, COPY), COPY)
        return lower(on_each, *self._arguments(layout), key, donate=1)

    def _lower_bias(self, layout: StepLayout) -> Lowered:
        return self._lower_change(self._operations.apply_bias, neutral_bias(self.vocab_size), layout)

    def _lower_penalties(self, layout: StepLayout) -> Lowered:
        return self._lower_change(self._operations.apply_penalties, neutral_penalties(self.vocab_size), layout)

    def _lower_mask(self, layout: StepLayout) -> Lowered:
        masks = self._mesh.shapes(jax.ShapeDtypeStruct((layout.rows, mask_words(self.vocab_size)), np.int32))
        mask = partial(self._operations.mask_logits, vocabulary=self._vocabulary)
        on_each = self._mesh.on_each(mask, (LOGITS, COPY), LOGITS)
        return lower(on_each, self._arguments(layout)[0], masks)

    def _lower_take_logits(self, layout: StepLayout, count: int) -> Lowered:
        rows = self._mesh.shapes(jax.ShapeDtypeStruct((count,), np.int32))
        on_each = self._mesh.on_each(lambda logits, rows: logits[rows], (LOGITS, COPY), LOGITS)
        return lower(on_each, self._arguments(layout)[0], rows)

    def _lower_logprobs(self, layout: StepLayout) -> Lowered:
        def compute(logits: Array, sampled: Array) -> Array:
            token_ids = sampled if self._drafter is None else sampled[0]
            return self._operations.compute_logprobs(logits, token_ids, self._vocabulary, self._num_tokens)

        shape = (layout.rows,) if self._drafter is None else (2, layout.rows)
        sampled = self._mesh.shapes(jax.ShapeDtypeStruct(shape, np.int32))
        on_each = self._mesh.on_each(compute, (LOGITS, COPY), COPY)
        return lower(on_each, self._arguments(layout)[0], sampled)

    def _lower_change(self, apply: Change[State], row: State, layout: StepLayout) -> Lowered:
        """Lower (state, logits, fed, sampling) -> (state, logits); the state is donated."""

        def change(state: State, logits: Array, fed: Fed, sampling: Array) -> tuple[State, Array]:
            return apply(logits, state, SamplerInputs.unpack(sampling, self._num_slots), fed, self._vocabulary)

        specs = _specs(row, None)
        on_each = self._mesh.on_each(change, (specs, LOGITS, COPY, COPY), (specs, LOGITS))
        return lower(on_each, self._abstract(row), *self._arguments(layout), donate=0)

    def _lower_writer(self, neutral: Callable[[int], State]) -> Lowered:
        row = neutral(self.vocab_size)
        specs, of_one = _specs(row, None), _specs(row)
        slot = self._mesh.shapes(jax.ShapeDtypeStruct((), np.int32))
        shapes = jax.tree.map(lambda leaf, spec: self._mesh.shapes(leaf, *spec), row, of_one)
        on_each = self._mesh.on_each(self._operations.write_slot, (specs, COPY, of_one), specs)
        return lower(on_each, self._abstract(row), slot, shapes, donate=0)

    def _arguments(self, layout: StepLayout) -> tuple[Any, ...]:
        """Abstract logits, what rows are fed, and packed SamplerInputs."""
        logits = jax.ShapeDtypeStruct((layout.rows, self.vocab_size), jnp.float32)
        sampling = jax.ShapeDtypeStruct((num_fields(drafts=self._drafter is not None), layout.rows), np.int32)
        return self._mesh.shapes(logits, *LOGITS), self._fed, self._mesh.shapes(sampling)

    def _maker(self, row: State) -> Callable[[], State]:
        """A function that creates the state of all slots from one row."""

        @jax.jit  # one program instead of two for each array, which take their time to be made
        def make() -> State:
            state: State = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self._num_slots, *leaf.shape)), row)
            return state

        return self._mesh.maker(make, _specs(row, None))

    def _abstract(self, row: State) -> State:
        """The shapes of the state of all slots."""

        def shape(leaf: NDArray[Any], spec: PartitionSpec) -> Any:
            return self._mesh.shapes(jax.ShapeDtypeStruct((self._num_slots, *leaf.shape), leaf.dtype), *spec)

        state: State = jax.tree.map(shape, row, _specs(row, None))
        return state


def _specs(row: State, *lead: None) -> Any:
    """How each field of a state is sharded: by vocabulary if it has an entry per token."""

    def spec(path: KeyPath[Any], _: NDArray[Any]) -> PartitionSpec:
        assert isinstance(path[-1], GetAttrKey)
        return PartitionSpec(*lead, TP) if path[-1].name in OVER_VOCABULARY else COPY

    return jax.tree_util.tree_map_with_path(spec, row)
