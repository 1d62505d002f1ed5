"""States in slots, and the recurrences over rows of any length, against a token at a time in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_recurrences import delta_token, plain_convolution, plain_scan, state_space_token

from caching.state.convolution import convolve
from caching.state.delta_rule import DeltaInputs, GatedDeltaRule, inverse_of_unit_lower
from caching.state.ragged import CHUNK, scan_rows
from caching.state.state_space import StateSpace, StateSpaceInputs
from caching.state.table import SINK_SLOT, StateTable

HEADS, GROUP = 4, 2
TOKENS, ROWS, SLOTS = 220, 6, 14
"""Of all steps here, so that each recurrence is compiled once."""


def delta_inputs(rng: np.random.Generator, tokens: int) -> DeltaInputs:
    """Of any length, with decays of a magnitude that is drawn for all."""
    keys = HEADS // GROUP
    return DeltaInputs(
        *(rng.normal(size=(tokens, keys, 8)).astype(np.float32) for _ in "qk"),
        rng.normal(size=(tokens, keys, GROUP, 6)).astype(np.float32),
        -rng.exponential(rng.choice([0.01, 1.0, 30.0]), size=(tokens, keys, GROUP)).astype(np.float32),
        rng.uniform(size=(tokens, keys, GROUP)).astype(np.float32),
    )


def state_space_inputs(rng: np.random.Generator, tokens: int) -> StateSpaceInputs:
    """Times and decays go together."""
    groups = HEADS // GROUP
    dt = rng.exponential(size=(tokens, groups, GROUP)).astype(np.float32)
    return StateSpaceInputs(
        rng.normal(size=(tokens, groups, GROUP, 6)).astype(np.float32),
        *(rng.normal(size=(tokens, groups, 8)).astype(np.float32) for _ in "bc"),
        dt,
        -dt * np.float32(rng.choice([0.01, 1.0, 16.0])),
    )


KINDS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any], tuple[int, ...]]] = {
    "delta rule": (GatedDeltaRule(), delta_inputs, delta_token, (HEADS, 8, 6)),
    "state space": (StateSpace(), state_space_inputs, state_space_token, (HEADS, 6, 8)),
}
ONE_AT_LEAST = ["delta rule", pytest.param("state space", marks=pytest.mark.thorough)]


@partial(jax.jit, static_argnums=0)
def scanned(kind: str, table: StateTable, states: Any, inputs: Any) -> Any:
    """``scan_rows``, compiled once for each kind."""
    (states,), outputs = scan_rows(KINDS[kind][0], table, (states,), inputs)
    return states, outputs


def build_table(lengths: Sequence[int], sources: Sequence[int], slots: Sequence[int], rows: int = ROWS) -> StateTable:
    """The table of rows of these lengths; padding rows write the sink."""
    padding = rows - len(lengths)
    starts = np.cumsum([0, *lengths, *[0] * padding], dtype=np.int32)
    padded = (np.array([*given, *[SINK_SLOT] * padding], np.int32) for given in (sources, slots))
    none = np.zeros(rows, np.int32)
    return StateTable(*map(jnp.asarray, (*padded, starts, np.array([len(lengths)], np.int32), none, none > 0, none)))


@pytest.mark.parametrize("kind", KINDS)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1]), min_size=1, max_size=3)
    | st.lists(st.sampled_from([1, 1, 1, 1, 5, 30]), min_size=1, max_size=ROWS),
    seed=st.integers(0, 2**31),
)
def test_rows_of_any_length_are_as_a_token_at_a_time(kind: str, lengths: list[int], seed: int) -> None:
    """Each row reads its source or begins, writes its slot and has the outputs of a plain loop; no other slot changes."""
    rng = np.random.default_rng(seed)
    _, build_inputs, token, shape = KINDS[kind]
    inputs, states = build_inputs(rng, TOKENS), rng.normal(size=(SLOTS, *shape)).astype(np.float32)
    slots = 1 + rng.permutation(SLOTS - 1)[: 2 * len(lengths)]
    own, kept = slots[: len(lengths)], slots[len(lengths) :]
    sources = [rng.choice([SINK_SLOT, *here]) for here in zip(own, kept, strict=True)]

    after, outputs = scanned(kind, build_table(lengths, sources, own), states, inputs)

    expected, start = states.copy(), 0
    for length, source, slot in zip(lengths, sources, own, strict=True):
        row = type(inputs)(*(x[start : start + length] for x in inputs))
        before = np.zeros(shape) if source == SINK_SLOT else np.float64(states[source])
        expected[slot], found = plain_scan(token, before, row)
        np.testing.assert_allclose(outputs[start : start + length], found, rtol=1e-5, atol=2e-5)
        start += length
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=2e-5)
    others = [slot for slot in range(SLOTS) if slot not in own]
    assert np.array_equal(np.asarray(after)[others], states[others])
    assert np.isfinite(outputs).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1] * 9 + [100], [3, CHUNK - 1, 1, CHUNK + 1], [CHUNK, 2 * CHUNK]])
def test_a_row_cut_into_steps_is_as_in_one(kind: str, steps: list[int]) -> None:
    """States and outputs do not depend on where steps end, beyond rounding."""
    rng = np.random.default_rng(len(steps))
    _, build_inputs, _, shape = KINDS[kind]
    total = sum(steps)
    inputs, states = build_inputs(rng, TOKENS), jnp.zeros((SLOTS, *shape))
    whole, expected = scanned(kind, build_table([total], [SINK_SLOT], [1]), states, inputs)

    outputs, source, start = [], SINK_SLOT, 0
    for length in steps:
        rest = jax.tree.map(lambda x, start=start: np.roll(x, -start, axis=0), inputs)
        states, found = scanned(kind, build_table([length], [source], [3]), states, rest)
        outputs.append(found[:length])
        source, start = 3, start + length

    np.testing.assert_allclose(np.concatenate(outputs), expected[:total], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(states[3], whole[1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_beside_others(kind: str) -> None:
    """A row's state and outputs do not depend on the other rows of its step, nor on padding tokens."""
    rng = np.random.default_rng(5)
    _, build_inputs, _, shape = KINDS[kind]
    lengths, states = [1, 1, 70, 5, 1], rng.normal(size=(SLOTS, *shape)).astype(np.float32)
    inputs = build_inputs(rng, TOKENS)
    together, outputs = scanned(kind, build_table(lengths, range(1, 6), range(6, 11)), states, inputs)

    start = 0
    for row, length in enumerate(lengths):
        alone = jax.tree.map(lambda x, start=start: np.roll(x, -start, axis=0), inputs)
        found, expected = scanned(kind, build_table([length], [1 + row], [6 + row]), states, alone)
        assert np.array_equal(expected[:length], outputs[start : start + length])
        assert np.array_equal(found[6 + row], together[6 + row])
        start += length


@pytest.mark.parametrize("kind", ONE_AT_LEAST)
def test_a_layer_of_several_in_one_array_keeps_to_its_slots(kind: str) -> None:
    """Rows that begin read zeros, and not the first slot of the layer before."""
    rng = np.random.default_rng(6)
    recurrence, build_inputs, _, shape = KINDS[kind]
    inputs = jax.tree.map(jnp.asarray, build_inputs(rng, 8))
    states = rng.normal(size=(3 * SLOTS, *shape)).astype(np.float32)
    table = build_table([1, 3, 2], [SINK_SLOT, SINK_SLOT, 4], [1, 2, 3])

    (after,), outputs = jax.jit(
        lambda table, *rest: scan_rows(recurrence, replace(table, num_slots=SLOTS).of_layer(jnp.int32(1)), *rest)
    )(table, (jnp.asarray(states),), inputs)

    alone, expected = scanned(kind, table, jnp.asarray(states[SLOTS : 2 * SLOTS]), inputs)
    assert np.array_equal(outputs, expected)
    assert np.array_equal(after[SLOTS : 2 * SLOTS], alone)
    assert np.array_equal(after[:SLOTS], states[:SLOTS])
    assert np.array_equal(after[2 * SLOTS :], states[2 * SLOTS :])


@pytest.mark.parametrize(("share", "beta"), [(0.0, 1), (0.9, 1), (1.0, 1), (0.9, 2), (1.0, 2)])
def test_repeated_tokens_do_not_blow_up(share: float, beta: int) -> None:
    """Equal keys without decay are the worst case: a series of powers would lose all digits.

    With a beta of 2 nothing is forgotten, and states grow; how far rounding takes them depends on the processor's sums.
    """
    rng = np.random.default_rng(7)
    inputs, states = delta_inputs(rng, TOKENS), jnp.zeros((SLOTS, HEADS, 8, 6))
    key = share * np.ones_like(inputs.k) + (1 - share) * inputs.k
    inputs = inputs._replace(k=key, beta=beta * np.ones_like(inputs.beta), log_decay=np.zeros_like(inputs.log_decay))

    _, outputs = scanned("delta rule", build_table([200], [SINK_SLOT], [1]), states, inputs)

    _, expected = plain_scan(delta_token, np.zeros((HEADS, 8, 6)), DeltaInputs(*(x[:200] for x in inputs)))
    np.testing.assert_allclose(outputs[:200], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_inverse_of_a_triangle() -> None:
    """Times the matrix it is one, for entries as large as any product of unit keys."""
    strict = np.tril(np.random.default_rng(8).uniform(-1, 1, size=(3, 16, 16)).astype(np.float32), -1)

    inverse = inverse_of_unit_lower(jnp.asarray(strict))

    expected = np.linalg.inv(np.eye(16) + np.float64(strict))
    np.testing.assert_allclose(inverse, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("taps", [2, 4])
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=ROWS),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_convolution_sees_the_tokens_before_the_step(taps: int, lengths: list[int], has_bias: bool, seed: int) -> None:
    """Windows are of each row's last tokens, of this step or before; those of other slots stay."""
    rng = np.random.default_rng(seed)
    channels, tokens = 5, 40
    x, weights = rng.normal(size=(tokens, channels)).astype(np.float32), rng.normal(size=(taps, channels))
    bias = rng.normal(size=channels) if has_bias else None
    windows = rng.normal(size=(SLOTS, (taps - 1) * channels)).astype(np.float32)
    slots = 1 + rng.permutation(SLOTS - 1)[: len(lengths)]
    sources = [rng.choice([SINK_SLOT, slot]) for slot in slots]
    wide = [None if each is None else jnp.asarray(each, jnp.float32) for each in (weights, bias)]

    (after,), sums = jax.jit(convolve)(build_table(lengths, sources, slots), (windows,), x, *wide)

    expected, start = windows.copy(), 0
    for length, source, slot in zip(lengths, sources, slots, strict=True):
        before = windows[source] * np.float32(source != SINK_SLOT)
        last, found = plain_convolution(before.reshape(taps - 1, -1), x[start : start + length], weights, bias)
        expected[slot] = last.reshape(-1)
        np.testing.assert_allclose(sums[start : start + length], found, rtol=1e-5, atol=2e-5)
        start += length
    assert np.array_equal(after, expected)


MOST_DRAFTS = 3
CHANNELS, TAPS = 5, 4


@partial(jax.jit, static_argnums=0)
def stepped(kind: str, table: StateTable, stored: Any, x: Any, weights: Any, inputs: Any) -> Any:
    """A step of a layer whose rows may have drafts."""
    windows, states, base = stored
    table, base = table.after_base(base)
    windows, sums = convolve(table, windows, x, weights, None)
    states, outputs = scan_rows(KINDS[kind][0], table, states, inputs)
    return (windows, states, base), sums, outputs


class Drafting:
    """Sequences of random tokens whose steps have drafts, of which some are wrong, in a layer and in plain loops."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng = kind, np.random.default_rng(seed)
        _, self._build_inputs, self._token, self._shape = KINDS[kind]
        like, undone = jax.tree.leaves(self._build_inputs(self.rng, 1)), 1 + MOST_DRAFTS
        behind = [jnp.full((SLOTS, undone * leaf.size), jnp.nan, leaf.dtype) for leaf in like]
        windows = [jnp.full((SLOTS, count * CHANNELS), jnp.nan, jnp.float32) for count in (TAPS - 1, undone)]
        states = jnp.full((SLOTS, *self._shape), jnp.nan)
        self.stored: Any = tuple(windows), (states, *behind), jnp.full((SLOTS, 1), 2**31 - 1, jnp.int32)
        self.weights = self.rng.normal(size=(TAPS, CHANNELS))
        self.plain = {row: (np.zeros((TAPS - 1, CHANNELS)), np.zeros(self._shape), 0) for row in range(ROWS)}
        self.slots = dict.fromkeys(range(ROWS), SINK_SLOT)
        self.free = list(range(1, SLOTS))

    def step(self, counts: dict[int, int], drafts: dict[int, int]) -> None:
        """Rows of so many tokens; of those with drafts, the last so many are wrong. Compares outputs."""
        x = self.rng.normal(size=(TOKENS, CHANNELS)).astype(np.float32)
        inputs = self._build_inputs(self.rng, TOKENS)
        sources = [self.slots[row] for row in counts]
        for row in counts:
            if self.slots[row] == SINK_SLOT or self.rng.random() < 0.3:  # the state before is kept
                self.slots[row] = self.free.pop(0)
        table = build_table(list(counts.values()), sources, [self.slots[row] for row in counts])
        padding = [0] * (ROWS - len(counts))
        starts = jnp.array([self.plain[row][2] for row in counts] + padding, jnp.int32)
        drafted = jnp.array([row in drafts for row in counts] + padding, jnp.bool_)
        table = replace(table, starts=starts, drafted=drafted)
        self.stored, sums, outputs = stepped(
            self.kind, table, self.stored, x, jnp.asarray(self.weights, jnp.float32), inputs
        )
        self.free += sorted(set(sources) - set(self.slots.values()) - {SINK_SLOT})

        begin = 0
        for row, count in counts.items():
            window, state, tokens = self.plain[row]
            mine = type(inputs)(*(part[begin : begin + count] for part in inputs))
            _, expected = plain_scan(self._token, state, mine)
            _, whole = plain_convolution(window, x[begin : begin + count], self.weights, None)
            np.testing.assert_allclose(outputs[begin : begin + count], expected, rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(sums[begin : begin + count], whole, rtol=1e-5, atol=2e-5)
            right = count - drafts.get(row, 0)
            window, _ = plain_convolution(window, x[begin : begin + right], self.weights, None)
            state, _ = plain_scan(self._token, state, type(inputs)(*(part[:right] for part in mine)))
            self.plain[row], begin = (window, state, tokens + right), begin + count


@pytest.mark.parametrize("kind", ONE_AT_LEAST)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_states_go_back_behind_wrong_drafts(kind: str, data: st.DataObject, seed: int) -> None:
    """Whatever follows: one token, more drafts, a long chunk, from its own slot or from one that was kept."""
    drafting = Drafting(kind, seed)
    for _ in range(data.draw(st.integers(2, 6))):
        counts, drafts = {}, {}
        for row in data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True)):
            counts[row] = data.draw(st.sampled_from([1, 1, 2, 3, 4, 4, 5, 30]))
            if 1 < counts[row] <= 1 + MOST_DRAFTS and data.draw(st.booleans()):
                drafts[row] = data.draw(st.integers(0, counts[row] - 1))
        drafting.step(counts, drafts)
