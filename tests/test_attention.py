"""Ragged paged attention: the XLA backend against its plain twin, and the twin against the TPU kernel's own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention as kernel_twin
from plain_attention import padded_table, plain_attention, without_what_windows_have_passed

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView
from caching.attention.xla_attention import XLAAttention, write_pages
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import LARGEST, as_read, as_stored, stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache

KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, PAGES_PER_SEQ = 2, 3, 8, 4, 60
SINKS = jnp.linspace(-2, 3, KV_HEADS * GROUP, dtype=jnp.float32)
_by_xla = jax.jit(XLAAttention(np.dtype(np.float32)), static_argnums=0)


def build_step(q_lens, kv_lens, *, rows=None, tokens=None, seed=0):
    """Random q, k, v and pages, and a table for rows of these lengths, padded to ``rows`` and ``tokens``.

    What nobody has written is NaN: the sink, and a row's last page behind its last token.
    """
    rng = np.random.default_rng(seed)
    rows, tokens = rows or len(q_lens), tokens or sum(q_lens)
    num_pages = 1 + sum(-(-length // PAGE_SIZE) for length in kv_lens)
    free = list(rng.permutation(np.arange(1, num_pages)))
    page_indices = np.zeros((rows, PAGES_PER_SEQ), np.int32)
    for row, length in enumerate(kv_lens):
        for column in range(-(-length // PAGE_SIZE)):
            page_indices[row, column] = free.pop()
    table = padded_table(q_lens, kv_lens, page_indices)
    q = rng.standard_normal((tokens, KV_HEADS * GROUP, HEAD_DIM), np.float32)
    kv_pages = rng.standard_normal((num_pages, KV_HEADS, 2, PAGE_SIZE, HEAD_DIM), np.float32)
    kv_pages[0] = np.nan
    for row, length in enumerate(kv_lens):
        if length % PAGE_SIZE:
            kv_pages[page_indices[row, length // PAGE_SIZE], :, :, length % PAGE_SIZE :] = np.nan
    k, v = rng.standard_normal((2, tokens, KV_HEADS, HEAD_DIM), np.float32)
    return AttentionInputs(*map(jnp.asarray, (q, k, v))), CacheView(jnp.asarray(kv_pages), table)


def build_metadata(*, num_pages=64, dtype=jnp.float32):
    """A pool of one layer of these pages."""
    return PagedAttentionCacheMetaData(
        num_layers=1,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=stored_head_dim(HEAD_DIM, np.dtype(dtype)),
        dtype=np.dtype(dtype),
    )


@pytest.mark.parametrize(
    ("window", "chunk"),
    [
        (None, None),
        (5, None),
        (None, 24),
        *(
            pytest.param(*reach, marks=pytest.mark.thorough)
            for reach in ((1, None), (70, None), (None, 1), (None, 100))
        ),
    ],
)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "rows", "tokens"),
    [
        pytest.param([1], [1], 1, 1, marks=pytest.mark.thorough),
        pytest.param([1], [200], 1, 1, marks=pytest.mark.thorough),
        pytest.param([1, 1, 1], [3, 130, 64], 4, 4, marks=pytest.mark.thorough),
        pytest.param([5], [5], 8, 8, marks=pytest.mark.thorough),
        pytest.param([100], [230], 4, 128, marks=pytest.mark.thorough),
        ([1, 1, 70, 65, 3], [9, 200, 70, 190, 4], 8, 256),
        pytest.param([1, 2], [64, 2], 4, 4, marks=pytest.mark.thorough),
        pytest.param([63, 64, 1], [63, 65, 130], 3, 128, marks=pytest.mark.thorough),
    ],
)
def test_blocks_and_tiles_agree_with_the_plain_twin(q_lens, kv_lens, rows, tokens, window, chunk):
    """The backend gives every real query what the plain twin gives it, whatever the mix of rows."""
    assert_agrees_with_the_plain_twin(
        AttentionSpec(0.3, window, chunk=chunk), *build_step(q_lens, kv_lens, rows=rows, tokens=tokens)
    )


def assert_agrees_with_the_plain_twin(spec, inputs, view):
    """Of real queries what the twin gives, and finite numbers of padding."""
    _, actual = _by_xla(spec, view, inputs)

    _, expected = plain_attention(spec, view, inputs)
    np.testing.assert_allclose(actual[: len(expected)], expected, atol=2e-6)
    assert np.isfinite(actual).all()


@pytest.mark.parametrize(
    ("soft_cap", "sinks", "window"),
    [
        pytest.param(0.7, None, None, id="cap", marks=pytest.mark.thorough),
        pytest.param(None, SINKS, None, id="sinks", marks=pytest.mark.thorough),
        pytest.param(0.7, SINKS, 5, id="all"),
    ],
)
def test_scores_are_capped_and_compete_with_sinks(soft_cap, sinks, window):
    """In decoding rows, in tiles and where they hang over, in a window and without."""
    inputs, view = build_step([1, 1, 70, 65, 3], [9, 200, 70, 190, 4], rows=8, tokens=256)

    assert_agrees_with_the_plain_twin(AttentionSpec(0.3, window, soft_cap), replace(inputs, sinks=sinks), view)


@pytest.mark.thorough
@pytest.mark.parametrize("reach", [{}, {"window": 5}, {"chunk": 24}])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"), [([1, 1, 1, 1], [1, 2, 3, 130]), ([1, 1, 7, 65, 3], [1, 200, 7, 190, 4])]
)
def test_keys_before_the_first_are_seen_by_themselves_alone(q_lens, kv_lens, reach):
    """In decoding rows and in tiles."""
    step = build_step(q_lens, kv_lens, rows=len(q_lens), tokens=sum(q_lens))
    assert_agrees_with_the_plain_twin(AttentionSpec(0.3, **reach, first=2), *step)


@pytest.mark.parametrize(
    ("window", "chunk"), [(5, None), pytest.param(70, None, marks=pytest.mark.thorough), (None, 30)]
)
def test_pages_that_a_window_has_passed_are_never_read(window, chunk):
    """They are somebody else's by then, or the sink, whose NaN would show; in decoding rows and in tiles."""
    spec, (inputs, view) = (
        AttentionSpec(0.3, window, chunk=chunk),
        build_step([1, 1, 70, 65, 3], [9, 200, 160, 190, 40], tokens=192),
    )

    _, out = _by_xla(spec, without_what_windows_have_passed(spec, view), inputs)

    np.testing.assert_array_equal(out, _by_xla(spec, view, inputs)[1])


def test_the_plain_twin_agrees_with_the_kernels():
    """Our arguments mean what the TPU kernel's mean."""
    spec = AttentionSpec(0.3, 9, 1.5)
    inputs, view = build_step([1, 7, 12], [30, 7, 40])
    table = view.table

    written, ours = plain_attention(spec, view, inputs)

    interleaved = written.transpose(0, 3, 1, 2, 4).reshape(len(written), PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        theirs = kernel_twin(
            inputs.q, jnp.asarray(interleaved), table.kv_lens, table.page_indices, table.cu_q_lens, table.num_seqs,
            sm_scale=0.3, sliding_window=9, soft_cap=1.5,
        )  # fmt: skip

    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_padding_tokens_are_written_to_the_sink():
    """Tokens after the last row's go to page 0, real ones to their own page and offset."""
    table = build_step([1, 3], [6, 3], rows=4, tokens=8)[1].table

    pages, offsets = table.locate(8, PAGE_SIZE)

    owned = np.asarray(table.page_indices)
    assert pages.tolist() == [owned[0, 1], owned[1, 0], owned[1, 0], owned[1, 0], 0, 0, 0, 0]
    assert offsets.tolist() == [1, 0, 1, 2, 0, 0, 0, 0]


def test_written_keys_and_values_are_read_back():
    """A write touches its own page and offset and nothing else."""
    kv_pages = jnp.zeros((3, KV_HEADS, 2, PAGE_SIZE, HEAD_DIM))
    k = jnp.ones((2, KV_HEADS, HEAD_DIM))

    written = write_pages(kv_pages, k, 2 * k, jnp.asarray([1, 2]), jnp.asarray([3, 0]), kv_pages.dtype)

    assert (written[1, :, 0, 3] == 1).all() and (written[2, :, 1, 0] == 2).all()
    assert float(jnp.abs(written).sum()) == 2 * KV_HEADS * HEAD_DIM * 3


KV_DTYPES = [np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)]
PRECISION = {"bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0.5 / 127}
"""The most that a number is off by, of its own size; of the largest of its head and token where there is a scale."""
TINY = 2**-10
"""Half of the smallest number in float8_e4m3fn."""


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "spec", "sinks"),
    [
        pytest.param(kv_dtype, *case, id=f"{name}-{kv_dtype}", marks=() if kv_dtype in few else pytest.mark.thorough)
        for name, case, few in (
            ("float32", (jnp.float32, AttentionSpec(0.3, 9), None), (np.int8,)),
            ("bfloat16", (jnp.bfloat16, AttentionSpec(0.3, 9), None), ()),
            ("capped, with sinks", (jnp.float32, AttentionSpec(0.3, None, 2.0), SINKS), ()),
        )
        for kv_dtype in KV_DTYPES
    ],
)
def test_attention_over_small_pages_is_that_over_what_they_hold(spec, sinks, kv_dtype, dtype):
    """Pages of fewer bits give what pages of the rounded numbers give, and a step's own keys are rounded like the rest."""
    inputs, view = build_step([1, 7, 12], [30, 7, 40])
    q, k = inputs.q.astype(dtype), (3 * inputs.q[:, :KV_HEADS]).astype(dtype)
    stored = as_stored(view.pages, kv_dtype)

    attention = jax.jit(XLAAttention(kv_dtype), static_argnums=0)
    written, out = attention(spec, CacheView(stored, view.table), AttentionInputs(q, k, -k, sinks=sinks))

    def held(numbers):
        return as_read(numbers, kv_dtype, np.dtype(np.float32))

    assert written.dtype == stored.dtype and (written != stored).any()
    k, v = (held(as_stored(x, kv_dtype)) for x in (k, -k))
    expected_pages, expected = plain_attention(
        spec, CacheView(held(stored), view.table), AttentionInputs(q.astype(np.float32), k, v, sinks=sinks)
    )
    np.testing.assert_array_equal(held(written), expected_pages)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=3e-6 if dtype == jnp.float32 else 0.05)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_number_is_off_by_no_more_than_its_bits(kv_dtype):
    """Small and large ones alike, zeros exactly; an outlier of one token is no burden to another, and may be cut off."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((50, 2, 8)) * 10 ** rng.uniform(-2, 1, (50, 1, 1))).astype(np.float32)
    x[0, 0], x[1, 1] = 0, 1e5

    held = np.asarray(as_read(as_stored(jnp.asarray(x), kv_dtype), kv_dtype, np.dtype(np.float32)))

    size = np.abs(x).max(axis=-1, keepdims=True) if kv_dtype == np.int8 else np.abs(x)
    expected = np.minimum(x, LARGEST.get(kv_dtype.name, np.inf))
    assert (
        np.abs(held - expected) <= PRECISION[kv_dtype.name] * size * 1.001 + TINY * (kv_dtype.name in LARGEST)
    ).all()
    assert not held[0, 0].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_what_is_not_a_number_stays_so(kv_dtype):
    """A step that goes wrong is found by what it computes."""
    x = jnp.ones((2, 8)).at[0, 3].set(np.nan)

    held = as_read(as_stored(x, kv_dtype), kv_dtype, np.dtype(np.float32))

    assert jnp.isnan(held[0]).any() and (held[1] == 1).all()


@pytest.mark.parametrize(
    "kv_dtype",
    [
        np.dtype(np.int8),
        *(
            pytest.param(dtype, marks=pytest.mark.thorough)
            for dtype in (np.dtype(np.float32), *KV_DTYPES)
            if dtype != np.int8
        ),
    ],
    ids=str,
)
def test_the_pool_is_neither_copied_nor_read_whole(kv_dtype):
    """A compiled step's scratch memory does not grow with the pool (an ancestor copied it every step)."""
    inputs, view = build_step([1, 1, 40], [9, 100, 60], rows=4, tokens=64)

    def scratch(num_pages):
        def step(pages, inputs, table):
            return XLAAttention(kv_dtype)(AttentionSpec(1.0), CacheView(pages, table), inputs)

        metadata = build_metadata(num_pages=num_pages, dtype=kv_dtype)
        pool = PagedAttentionCache.layer_struct(metadata)
        analysis = jax.jit(step, donate_argnums=0).lower(pool, inputs, view.table).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == metadata.num_bytes
        return analysis.temp_size_in_bytes

    assert scratch(8192) == scratch(64)
