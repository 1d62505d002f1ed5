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
from tpu_twins import plain_twin

from caching.attention import xla_attention as attention
from caching.attention.xla_attention import PageTable
from caching.tpu import pallas_writes
from caching.tpu.jax_attention import TPUAttention
from caching.tpu.pallas_attention import PallasAttention, holds_table, stored_heads
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS

V5E = CHIPS["TPU v5 lite"]
SLOW = replace(V5E, hbm_bandwidth=1e9)
"""Of whose memory a block is a page: a row has several."""
PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 64, 3, 40, 4
STATIC = ("sm_scale", "sliding_window", "soft_cap")
SINKS = jnp.linspace(-3, 3, 32, dtype=jnp.float32)


@st.composite
def ragged_steps(draw):
    """Lengths of a step's rows: (queries, tokens) each, those of a single query first."""
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 7, 12]), st.integers(0, 150)), min_size=1, max_size=ROWS))
    rows = sorted((queries, queries + before) for queries, before in rows)
    return rows if sum(queries for queries, _ in rows) <= TOKENS else rows[:3]


def build_step(rows, *, heads, kv_heads, head_dim, dtype, seed=0, page_dtype=None):
    """Random q, k, v of a step, its table, and pages [num_pages, kv_heads, 2, page_size, head_dim] as XLA has them.

    What no row has written there is NaN.
    """
    rng = np.random.default_rng(seed)
    q_lens, kv_lens = zip(*rows, strict=True)
    padding = ROWS - len(rows)
    page_indices = rng.permutation(np.arange(1, 1 + ROWS * PAGES_PER_SEQ)).reshape(ROWS, -1).astype(np.int32)
    table = PageTable(
        kv_lens=jnp.asarray([*kv_lens, *[0] * padding], jnp.int32),
        page_indices=jnp.asarray(page_indices),
        cu_q_lens=jnp.asarray([0, *np.cumsum(q_lens), *[sum(q_lens)] * padding], jnp.int32),
        num_seqs=jnp.asarray([len(rows)], jnp.int32),
    )
    shapes = [(TOKENS, heads, head_dim), *[(TOKENS, kv_heads, head_dim)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    pages = np.full((page_indices.size + 1, kv_heads, 2, PAGE_SIZE, head_dim), np.nan)
    for row, (queries, tokens) in enumerate(rows):
        for position in range(tokens - queries):
            page = page_indices[row, position // PAGE_SIZE]
            pages[page, :, :, position % PAGE_SIZE] = rng.standard_normal((kv_heads, 2, head_dim))
    return q, k, v, table, np.asarray(pages, page_dtype or dtype)


def as_ours(pages):
    """XLA's pages as our kernel has them."""
    num_pages, kv_heads, _, page_size, head_dim = pages.shape
    _, wide = stored_heads(kv_heads, head_dim, np.dtype(pages.dtype))
    padded = np.pad(pages.transpose(0, 1, 3, 2, 4), [(0, 0)] * 4 + [(0, wide - head_dim)])
    return padded.reshape(num_pages, kv_heads, page_size, 2 * wide)


def plainly(pages, q, k, v, table, *, sm_scale, sliding_window=None, soft_cap=None, sinks=None):
    """The same in float64, one row after the other: the pages, and what the queries attend to."""
    cu_q_lens, kv_lens, page_indices = (np.asarray(x) for x in (table.cu_q_lens, table.kv_lens, table.page_indices))
    new = np.asarray(jnp.stack([k, v], axis=2).astype(pages.dtype))
    pages, q = np.array(pages), np.float64(q)
    rows = range(int(table.num_seqs[0]))
    for row in rows:
        for token in range(cu_q_lens[row], cu_q_lens[row + 1]):
            position = kv_lens[row] - cu_q_lens[row + 1] + token
            pages[page_indices[row, position // PAGE_SIZE], :, :, position % PAGE_SIZE] = new[token]
    outputs = []
    for row in rows:
        begin, past, kv_len = cu_q_lens[row], cu_q_lens[row + 1], kv_lens[row]
        stored = np.concatenate(np.float64(pages[page_indices[row]]), axis=2)[:, :, :kv_len]
        keys, values = np.moveaxis(stored.repeat(q.shape[1] // k.shape[1], axis=0), 1, 0)
        scores = np.einsum("qhd,hkd->hqk", q[begin:past], keys) * sm_scale
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        query, key = np.arange(kv_len - (past - begin), kv_len)[:, None], np.arange(kv_len)
        seen = (key <= query) & (sliding_window is None or key > query - sliding_window)
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(-1) + (0 if sinks is None else np.exp(np.float64(sinks))[:, None])
        outputs.append(np.einsum("hqk,hkd->qhd", weights / total[..., None], values))
    return pages, np.concatenate(outputs)


CASES = {
    "wide heads, capped, with sinks": (
        {"heads": 32, "kv_heads": 1, "head_dim": 128, "dtype": jnp.float32},
        {"soft_cap": 2.0, "sinks": SINKS},
        1e-5,
    ),
    "narrow heads in a window": (
        {"heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": jnp.bfloat16},
        {"sliding_window": 71},
        2e-2,
    ),
    "pages of 8 bits": (
        {"heads": 3, "kv_heads": 1, "head_dim": 80, "dtype": jnp.bfloat16, "page_dtype": jnp.float8_e4m3fn},
        {},
        2e-2,
    ),
}
_xla = jax.jit(attention.paged_attention, static_argnames=(*STATIC[:2], "kv_dtype"))
_ours = jax.jit(PallasAttention(SLOW, interpret=True), static_argnames=STATIC)


@pytest.fixture(scope="module", autouse=True)
def few_granules():
    """So little on-chip memory for granules that they come in several batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_writes, "AT_ONCE_BYTES", 2**16)
        yield


def check(rows, case, seed):
    """Pages and results of the kernel are those of plain attention."""
    shapes, options, tolerance = CASES[case]
    q, k, v, table, pages = build_step(rows, **shapes, seed=seed)
    options = {"sliding_window": None, **options}

    written, out = _ours(as_ours(pages), q, k, v, table, sm_scale=0.3, **options)

    plain, expected = plainly(pages, q, k, v, table, sm_scale=0.3, **options)
    np.testing.assert_allclose(np.float64(out)[: len(expected)], expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(np.float32(written), np.float32(as_ours(plain)))


@pytest.mark.parametrize("case", [*list(CASES)[:2], pytest.param(list(CASES)[2], marks=pytest.mark.thorough)])
@settings(max_examples=1 + settings.default.max_examples // 50)
@given(rows=ragged_steps(), seed=st.integers(0, 99))
def test_the_kernel_writes_and_attends_as_plain_attention_does(case, rows, seed):
    """On ragged batches, whatever is beside a row's tokens in its pages; no other page is touched."""
    check(rows, case, seed)


@pytest.mark.thorough
def test_the_kernel_agrees_with_the_other_attentions():
    """With XLA's and with the plain twin of jax's kernel."""
    shapes, options, tolerance = CASES["narrow heads in a window"]
    q, k, v, table, pages = build_step([(1, 1), (1, 90), (7, 133), (12, 12)], **shapes)
    num_pages, kv_heads, _, _, head_dim = pages.shape
    for_jax = np.pad(pages.transpose(0, 3, 1, 2, 4), [(0, 0)] * 4 + [(0, 64)])
    for_jax = for_jax.reshape(num_pages, PAGE_SIZE, 2 * kv_heads, 2 * head_dim)

    _, out = _ours(as_ours(pages), q, k, v, table, sm_scale=0.3, **options)

    _, by_xla = _xla(pages.view(np.uint16), q, k, v, table, sm_scale=0.3, kv_dtype=np.dtype(pages.dtype), **options)
    _, by_jax = TPUAttention(V5E, plain_twin)(jnp.asarray(for_jax), q, k, v, table, sm_scale=0.3, **options)
    for other in (by_xla, by_jax):
        np.testing.assert_allclose(np.float32(out)[:21], np.float32(other)[:21], atol=tolerance, rtol=tolerance)


def test_a_row_reads_what_another_writes_in_the_same_step():
    """A prompt that begins like one of the same step has its pages, even where the one that fills them comes later."""
    shapes, options, tolerance = CASES["narrow heads in a window"]
    q, k, v, table, pages = build_step([(1, 65), (34, 64)], **shapes)
    shared = table.page_indices.at[0, 0].set(table.page_indices[1, 0])
    table = replace(table, page_indices=shared)

    _, out = _ours(as_ours(pages), q, k, v, table, sm_scale=0.3, **options)

    _, expected = plainly(pages, q, k, v, table, sm_scale=0.3, **options)
    np.testing.assert_allclose(np.float64(out)[:35], expected, atol=tolerance, rtol=tolerance)


def test_no_transfer_meets_another():
    """In an interpreter that moves bytes as late as may be, and has NaN wherever nothing has been moved."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # the only place that tells

    shapes, options, tolerance = CASES["narrow heads in a window"]
    q, k, v, table, pages = build_step([(1, 1), (1, 90), (7, 133), (12, 12)], **shapes)
    pltpu.reset_tpu_interpret_mode_state()
    watched = PallasAttention(SLOW, interpret=pltpu.InterpretParams(detect_races=True))

    _, out = jax.jit(watched, static_argnames=STATIC)(as_ours(pages), q, k, v, table, sm_scale=0.3, **options)

    _, expected = plainly(pages, q, k, v, table, sm_scale=0.3, **options)
    np.testing.assert_allclose(np.float64(out)[:21], expected, atol=tolerance, rtol=tolerance)
    assert interpreter.races.races_found is False


def test_what_fits_scalar_memory():
    """The page table lies there without padding."""
    assert holds_table(64, 3900) and not holds_table(64, 4096) and holds_table(2048, 64)


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
