"""Our own attention kernel for TPUs: in Pallas' interpreter against plain attention, and against the compiler."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_attention import assert_compiles_in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from plain_attention import padded_table, plain_attention, without_what_windows_have_passed
from tpu_twins import plain_twin

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView
from caching.attention.xla_attention import XLAAttention
from caching.tpu import pallas_geometry, pallas_writes
from caching.tpu.jax_attention import MOST_PAGES_PER_SEQ, TPUAttention, rows_at_once
from caching.tpu.pallas_attention import PallasAttention, stored_heads
from caching.tpu.pallas_geometry import table_blocks
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS

V5E = CHIPS["TPU v5 lite"]
SLOW = replace(V5E, hbm_bandwidth=1e9)
"""Of whose memory a block is a page: a row has several."""
PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 64, 3, 40, 4
SINKS = jnp.linspace(-3, 3, 32, dtype=jnp.float32)


@st.composite
def ragged_steps(draw):
    """Lengths of a step's rows: (queries, tokens) each, those of a single query first."""
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 7, 12]), st.integers(0, 150)), min_size=1, max_size=ROWS))
    rows = sorted((queries, queries + before) for queries, before in rows)
    return rows if sum(queries for queries, _ in rows) <= TOKENS else rows[:3]


def build_step(lens, *, heads, kv_heads, head_dim, dtype, seed=0, page_dtype=None, rows=ROWS):
    """A step's random inputs, and a view of pages [num_pages, kv_heads, 2, page_size, head_dim] as XLA has them.

    What no row has written there is NaN.
    """
    rng = np.random.default_rng(seed)
    q_lens, kv_lens = zip(*lens, strict=True)
    page_indices = rng.permutation(np.arange(1, 1 + rows * PAGES_PER_SEQ)).reshape(rows, -1).astype(np.int32)
    table = padded_table(q_lens, kv_lens, page_indices)
    shapes = [(TOKENS, heads, head_dim), *[(TOKENS, kv_heads, head_dim)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    pages = np.full((page_indices.size + 1, kv_heads, 2, PAGE_SIZE, head_dim), np.nan)
    for row, (queries, tokens) in enumerate(lens):
        for position in range(tokens - queries):
            page = page_indices[row, position // PAGE_SIZE]
            pages[page, :, :, position % PAGE_SIZE] = rng.standard_normal((kv_heads, 2, head_dim))
    return AttentionInputs(q, k, v), CacheView(np.asarray(pages, page_dtype or dtype), table)


def as_ours(pages):
    """XLA's pages as our kernel has them."""
    num_pages, kv_heads, _, page_size, head_dim = pages.shape
    _, wide = stored_heads(kv_heads, head_dim, np.dtype(pages.dtype))
    padded = np.pad(pages.transpose(0, 1, 3, 2, 4), [(0, 0)] * 4 + [(0, wide - head_dim)])
    return padded.reshape(num_pages, kv_heads, page_size, 2 * wide)


CASES = {
    "wide heads, capped, with sinks": (
        {"heads": 32, "kv_heads": 1, "head_dim": 128, "dtype": jnp.float32},
        AttentionSpec(0.3, soft_cap=2.0),
        SINKS,
        1e-5,
    ),
    "narrow heads in a window": (
        {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": jnp.bfloat16},
        AttentionSpec(0.3, 71),
        None,
        2e-2,
    ),
    "in chunks": (
        {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": jnp.float32},
        AttentionSpec(0.3, chunk=40),
        None,
        1e-5,
    ),
    "behind the first keys": (
        {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": jnp.float32},
        AttentionSpec(0.3, first=2),
        None,
        1e-5,
    ),
    "pages of 8 bits": (
        {"heads": 3, "kv_heads": 1, "head_dim": 80, "dtype": jnp.bfloat16, "page_dtype": jnp.float8_e4m3fn},
        AttentionSpec(0.3),
        None,
        2e-2,
    ),
}
_ours = jax.jit(PallasAttention(SLOW, interpret=True), static_argnums=0)


@pytest.fixture(scope="module", autouse=True)
def few_granules():
    """So little on-chip memory for granules that they come in several batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_writes, "AT_ONCE_BYTES", 2**16)
        yield


def check(rows, case, seed):
    """Pages and results of the kernel are those of plain attention."""
    shapes, spec, sinks, tolerance = CASES[case]
    inputs, view = build_step(rows, **shapes, seed=seed)
    inputs = replace(inputs, sinks=sinks)

    written, out = _ours(spec, replace(view, pages=as_ours(view.pages)), inputs)

    plain, expected = plain_attention(spec, view, inputs)
    np.testing.assert_allclose(np.float64(out)[: len(expected)], expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.float32(written), np.float32(as_ours(plain)))


@pytest.mark.parametrize(
    "case", [*list(CASES)[:1], *(pytest.param(case, marks=pytest.mark.thorough) for case in list(CASES)[1:])]
)
@settings(max_examples=max(1, settings.default.max_examples // 50))
@given(rows=ragged_steps(), seed=st.integers(0, 99))
def test_the_kernel_writes_and_attends_as_plain_attention_does(case, rows, seed):
    """On ragged batches, whatever is beside a row's tokens in its pages; no other page is touched."""
    check(rows, case, seed)


@pytest.mark.thorough
def test_the_kernel_agrees_with_the_other_attentions():
    """With XLA's and with the plain twin of jax's kernel."""
    shapes, spec, _, tolerance = CASES["narrow heads in a window"]
    inputs, view = build_step([(1, 1), (1, 90), (7, 133), (12, 12)], **shapes)
    pages = view.pages
    num_pages, kv_heads, _, _, head_dim = pages.shape
    for_jax = np.pad(pages.transpose(0, 3, 1, 2, 4), [(0, 0)] * 4 + [(0, 64)])
    for_jax = for_jax.reshape(num_pages, PAGE_SIZE, 2 * kv_heads, 2 * head_dim)

    _, out = _ours(spec, replace(view, pages=as_ours(pages)), inputs)

    by_xla = jax.jit(XLAAttention(np.dtype(pages.dtype)), static_argnums=0)
    _, by_xla = by_xla(spec, replace(view, pages=pages.view(np.uint16)), inputs)
    _, by_jax = TPUAttention(V5E, plain_twin)(spec, replace(view, pages=jnp.asarray(for_jax)), inputs)
    for other in (by_xla, by_jax):
        np.testing.assert_allclose(np.float32(out)[:21], np.float32(other)[:21], atol=tolerance, rtol=tolerance)


@pytest.mark.thorough
def test_pages_that_a_window_has_passed_are_never_read():
    """They are somebody else's by then, or the sink, whose NaN would show; in decoding rows and in tiles."""
    shapes, spec, _, _ = CASES["narrow heads in a window"]
    inputs, view = build_step([(1, 150), (1, 192), (30, 190)], **shapes)
    passed = without_what_windows_have_passed(spec, view)
    assert (passed.table.page_indices[:3] == 0).any(axis=1).all()

    _, out = _ours(spec, replace(passed, pages=as_ours(view.pages)), inputs)

    expected = _ours(spec, replace(view, pages=as_ours(view.pages)), inputs)[1]
    np.testing.assert_array_equal(np.float32(out)[:32], np.float32(expected)[:32])


@pytest.mark.thorough
def test_a_row_reads_what_another_writes_in_the_same_step():
    """A prompt that begins like one of the same step has its pages, even where the one that fills them comes later."""
    shapes, spec, _, tolerance = CASES["narrow heads in a window"]
    inputs, view = build_step([(1, 65), (34, 64)], **shapes)
    indices = view.table.page_indices
    view = replace(view, table=replace(view.table, page_indices=indices.at[0, 0].set(indices[1, 0])))

    _, out = _ours(spec, replace(view, pages=as_ours(view.pages)), inputs)

    _, expected = plain_attention(spec, view, inputs)
    np.testing.assert_allclose(np.float64(out)[:35], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.thorough
def test_no_transfer_meets_another():
    """In an interpreter that moves bytes as late as may be, and has NaN wherever nothing has been moved."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # the only place that tells

    shapes, spec, _, tolerance = CASES["narrow heads in a window"]
    inputs, view = build_step([(1, 1), (1, 90), (7, 133), (12, 12)], **shapes)
    pltpu.reset_tpu_interpret_mode_state()
    watched = PallasAttention(SLOW, interpret=pltpu.InterpretParams(detect_races=True))

    _, out = jax.jit(watched, static_argnums=0)(spec, replace(view, pages=as_ours(view.pages)), inputs)

    _, expected = plain_attention(spec, view, inputs)
    np.testing.assert_allclose(np.float64(out)[:21], expected, atol=tolerance, rtol=tolerance)
    assert interpreter.races.races_found is False


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(count, marks=pytest.mark.thorough if count == 9 else pytest.mark.exhaustive)
        for count in (7, 8, 9, 16, 17)
    ],
)
def test_a_page_table_is_read_in_blocks_of_rows(count, monkeypatch):
    """At the edges of blocks too, where a row reads what one of another block writes in the same step."""
    monkeypatch.setattr(pallas_geometry, "TABLE_BYTES", 4 * 8 * 128)
    assert table_blocks(count, PAGES_PER_SEQ).rows == 8
    shapes, spec, _, tolerance = CASES["narrow heads in a window"]
    decodes = [(1, 65 + 7 * row) for row in range(count - 2)]
    inputs, view = build_step([*decodes, (5, 70), (9, 64)], **shapes, rows=count)
    indices = view.table.page_indices
    view = replace(view, table=replace(view.table, page_indices=indices.at[0, 0].set(indices[-1, 0])))
    by_blocks = jax.jit(PallasAttention(SLOW, interpret=True), static_argnums=0)

    written, out = by_blocks(spec, replace(view, pages=as_ours(view.pages)), inputs)

    plain, expected = plain_attention(spec, view, inputs)
    np.testing.assert_allclose(np.float64(out)[: len(expected)], expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.float32(written), np.float32(as_ours(plain)))


@pytest.mark.parametrize(
    ("rows", "pages_per_seq", "block"),
    [(3, 1, (8, 128)), (64, 1024, (64, 1024)), (256, 1024, (240, 1024)), (256, 8192, (30, 8192)), (9, 1025, (9, 2048))],
)
def test_a_block_is_as_much_of_a_page_table_as_scalar_memory_holds(rows, pages_per_seq, block):
    """Of 256 sequences of 131k tokens in pages of 128 or 16, too; each block begins at whole transfers."""
    blocks = table_blocks(rows, pages_per_seq)

    assert (blocks.rows, blocks.width) == block
    assert blocks.size % 1024 == 0 and 4 * blocks.size < 2**20
    assert blocks.padded(jnp.zeros((rows, pages_per_seq), jnp.int32)).size == -(-rows // block[0]) * blocks.size


@pytest.mark.parametrize("pages_per_seq", [MOST_PAGES_PER_SEQ - 1, MOST_PAGES_PER_SEQ])
def test_a_block_has_one_row_at_least(pages_per_seq):
    """Of the longest that a daemon starts with."""
    assert table_blocks(4, pages_per_seq).rows == rows_at_once(pages_per_seq) == 1


@pytest.mark.parametrize(
    ("topology", "heads", "kv_heads", "head_dim"),
    [
        *[("v5e:2x2", *shape) for shape in [(4, 1, 128), (32, 8, 128), (8, 1, 128), (14, 2, 64)]],
        *[("v6e:2x2", *shape) for shape in [(4, 1, 128), (14, 2, 64)]],
    ],
)
def test_the_kernel_compiles_and_copies_no_pages(topology, heads, kv_heads, head_dim):
    """For a chip that is not there: the pages are written in place, and scratch does not grow with them."""
    pytest.importorskip("libtpu")

    assert_compiles_in_place(PALLAS, topology, heads, kv_heads, head_dim)
