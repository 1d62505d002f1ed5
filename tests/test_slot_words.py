"""Factors of adapters on a CPU: what is stored in a slot, and the kernel that reads it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caching.cpu_kernels import KernelsUnavailable
from engine.errors import ConfigurationError
from engine.models.adapters import slot_words as module
from engine.models.adapters.adapted import AdapterRows, Apart, Parts
from engine.models.adapters.slot_words import num_words, slot_words

FLOAT32 = np.dtype(np.float32)
INPUTS, RANK = 70, 19
PARTS, OUT = Parts(1, (16, 5, 3)), (2, 24, 7)
"""Three parts, joined on the second of three axes: some panels of outputs are in several places."""
RANKS = ((19, 3, 0), (0, 0, 0), (1, 16, 8), (0, 2, 19))
"""Of each part in each slot."""


def factors(ranks, dtype=FLOAT32, seed=0):
    """a and b of a slot's parts, random up to their ranks and zeros behind."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(len(ranks), RANK, INPUTS)), [rng.normal(size=(RANK, 2 * 7 * size)) for size in PARTS.sizes]
    for part, rank in enumerate(ranks):
        a[part, rank:], b[part][rank:] = 0, 0
    return a.astype(dtype).astype(np.float32), [each.astype(dtype).astype(np.float32) for each in b]


def words(a, b):
    """A slot's content."""
    return slot_words(a, b, num_words(RANK, INPUTS, tuple(each.shape[1] for each in b), FLOAT32))


def added(slots, content, products, x):
    """f32[T, *OUT], with what adapters add to ``products``."""
    rows, adapters = AdapterRows(jnp.asarray(slots, jnp.int32), len(content)), Apart(jnp.asarray(content), PARTS)
    found = jax.jit(partial(Apart.added, out=OUT))(adapters, jnp.asarray(products), jnp.asarray(x), rows)
    return np.asarray(found).reshape(-1, *OUT)


def rows_of(count):
    """Products and inputs of so many rows."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, int(np.prod(OUT)))).astype(np.float32), rng.normal(size=(count, INPUTS)).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize("dtype", [FLOAT32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_rows_get_what_their_slots_hold(dtype, count):
    """Whatever ranks the parts have, and wherever their outputs are."""
    every = [factors(ranks, dtype, seed) for seed, ranks in enumerate(RANKS)]
    slots, (products, x) = np.random.default_rng(2).integers(-1, len(RANKS), count), rows_of(count)

    found = added(slots, [words(a, b) for a, b in every], products, x)

    for row, slot in enumerate(slots):
        deltas = [np.zeros((2, size, 7)) for size in PARTS.sizes]
        if slot >= 0:
            a, b = every[slot]
            deltas = [(x[row].astype(float) @ low.T @ high).reshape(2, -1, 7) for low, high in zip(a, b, strict=True)]
        wanted = products[row].reshape(OUT) + np.concatenate(deltas, axis=1)
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-3)


def test_a_rows_product_does_not_depend_on_the_others():
    """To the bit, whichever adapters they have."""
    content = [words(*factors(ranks, seed=seed)) for seed, ranks in enumerate(RANKS)]
    products, x = rows_of(40)

    together = added(np.arange(40) % 4, content, products, x)

    for row in (0, 2, 3, 37):
        alone = added([row % 4], content, products[row : row + 1], x[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


def test_numbers_that_bfloat16_has_are_stored_in_it_and_nothing_is_rounded():
    """One number that it has not, in another part, makes all of the slot's float32; the product is the same."""
    a, b = factors((4, 4, 4), jnp.bfloat16)
    narrow, other = words(a, b), [b[0], b[1], b[2].copy()]
    other[2][0, 0] += 2.0**-12
    wide, (products, x) = words(a, other), rows_of(3)

    found = [added([0, 0, 0], [content], products, x) for content in (narrow, wide)]

    assert (narrow[0], wide[0]) == (2, 4)
    np.testing.assert_array_equal(found[0][:, :, :21], found[1][:, :, :21])


def test_a_slot_has_the_rank_of_each_part_and_nothing_of_one_without_an_adapter():
    """What is zeros in one factor counts as zeros in both."""
    a, b = factors((19, 3, 8))
    b[0][5:], a[1][:] = 0, 0

    assert list(words(a, b)[:4]) == [4, 5, 0, 8]
    assert not words(np.zeros_like(a), b).any()


def test_a_machine_without_a_compiler_hears_why_it_serves_no_adapters(monkeypatch):
    """Though the other kernels may be there from an earlier start."""

    def unavailable(_):
        raise KernelsUnavailable("no C++ compiler on the PATH")

    module._register.cache_clear()
    monkeypatch.setattr(module, "load", unavailable)

    with pytest.raises(ConfigurationError, match="adapters need a kernel of their own on a CPU: no C"):
        num_words(RANK, INPUTS, (8,), FLOAT32)
