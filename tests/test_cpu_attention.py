"""The CPU's own attention against the plain twin, and what it promises besides: in place, and the same in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caching.attention import cpu_attention
from caching.attention.xla_attention import PageTable, ref_ragged_paged_attention
from caching.cpu_kernels import KernelsUnavailable
from engine.models.rope import rotate

try:
    WIDTH = cpu_attention.vector_width()
except KernelsUnavailable as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)

KV_HEADS, PAGES_PER_SEQ = 2, 40


def build_step(q_lens, kv_lens, *, group=3, head_dim=32, page_size=16, padding=0, seed=0):
    """Random q, k, v and pages for rows of these lengths, with so many rows and tokens of padding behind them."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    free = iter(rng.permutation(np.arange(1, 1 + sum(counts))))
    page_indices = np.zeros((len(q_lens) + padding, PAGES_PER_SEQ), np.int32)
    for row, count in enumerate(counts):
        page_indices[row, :count] = [next(free) for _ in range(count)]
    table = PageTable(
        kv_lens=jnp.asarray([*kv_lens, *[0] * padding], jnp.int32),
        page_indices=jnp.asarray(page_indices),
        cu_q_lens=jnp.asarray([0, *np.cumsum(q_lens), *[sum(q_lens)] * padding], jnp.int32),
        num_seqs=jnp.asarray([len(q_lens)], jnp.int32),
    )
    tokens = sum(q_lens) + padding
    shapes = [(tokens, KV_HEADS * group, head_dim), *[(tokens, KV_HEADS, head_dim)] * 2]
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    pages = rng.standard_normal((1 + sum(counts), KV_HEADS, 2, page_size, head_dim), np.float32)
    return pages, q, k, v, table


def attend(pages, q, k, v, table, *, angles=None, window=None):
    """Pages and output, as numpy arrays; nothing is turned where there are no angles f[tokens, 1, head_dim / 2]."""
    step = jax.jit(cpu_attention.paged_attention, static_argnames=("sm_scale", "sliding_window"), donate_argnums=0)
    angles = np.zeros((len(q), 1, q.shape[2] // 2), np.float32) if angles is None else angles
    arrays = map(jnp.array, (pages, q, k, v, np.cos(angles), np.sin(angles)))
    written, out = step(*arrays, table, sm_scale=0.3, sliding_window=window)
    return np.asarray(written), np.asarray(out)


def token_major(pages):
    """Keys turned as the plain twin reads them: [head_dim, page_size] in memory to [page_size, head_dim]."""
    page_size, head_dim = pages.shape[3:]
    turned = pages.copy()
    keys = pages[:, :, 0].reshape(*pages.shape[:2], head_dim, page_size)
    turned[:, :, 0] = keys.swapaxes(-1, -2)
    return turned


STEPS = {
    "one token": ([1], [1]),
    "a decode": ([1], [200]),
    "decodes": ([1, 1, 1, 1], [3, 130, 64, 129]),
    "a prompt": ([100], [100]),
    "a chunk": ([100], [230]),
    "a mix": ([1, 1, 70, 65, 3], [9, 200, 70, 190, 4]),
}


@pytest.mark.parametrize(
    "window", [None, 5, *(pytest.param(window, marks=pytest.mark.thorough) for window in (1, 140))]
)
@pytest.mark.parametrize("step", STEPS)
def test_the_kernel_agrees_with_the_plain_twin(step, window):
    """Every real query gets what the plain twin gives it over the pages as written, whatever the mix of rows."""
    pages, q, k, v, table = build_step(*STEPS[step], padding=3)

    written, out = attend(pages, q, k, v, table, window=window)

    real = int(table.cu_q_lens[-1])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = ref_ragged_paged_attention(
            jnp.asarray(q), jnp.asarray(token_major(written)), table, sm_scale=0.3, sliding_window=window
        )
    np.testing.assert_allclose(out[:real], expected, atol=3e-6)
    assert not out[real:].any()


@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"),
    [
        (4, 80, 16),
        (60, 16, 128),
        *(
            pytest.param(*shape, marks=pytest.mark.thorough)
            for shape in [(1, 16, 16), (1, 48, 32), (7, 64, 64), (2, 128, 16)]
        ),
    ],
)
def test_the_kernel_knows_every_shape_of_whole_vectors(group, head_dim, page_size):
    """Heads that do not fill a tile, groups wider than one, pages longer than a vector."""
    step = build_step([1, 1, 30, 9], [70, 5, 30, 77], group=group, head_dim=head_dim, page_size=page_size)

    written, out = attend(*step)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected = ref_ragged_paged_attention(
            jnp.asarray(step[1]), jnp.asarray(token_major(written)), step[4], sm_scale=0.3
        )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_queries_and_keys_are_turned_by_their_positions():
    """The kernel's rotation is the model's own."""
    pages, q, k, v, table = build_step([1, 20], [50, 37], padding=2)
    angles = np.random.default_rng(1).uniform(0, 6, (len(q), 1, 16)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)

    written, out = attend(pages, q, k, v, table, angles=angles)

    turned = (np.asarray(rotate(jnp.asarray(x), cos, sin)) for x in (q, k))
    expected_pages, expected = attend(pages, *turned, v, table)
    np.testing.assert_allclose(written, expected_pages, atol=1e-6)
    np.testing.assert_allclose(out, expected, atol=3e-6)


def test_a_step_writes_its_own_tokens_and_nothing_else():
    """Keys and values land at their page and offset; every other number in the pool stays what it was."""
    pages, q, k, v, table = build_step([1, 3], [18, 3], padding=2)

    written, _ = attend(pages, q, k, v, table)

    expected, owned = token_major(pages), np.asarray(table.page_indices)
    for token, (page, offset) in enumerate([(owned[0, 1], 1), *((owned[1, 0], offset) for offset in range(3))]):
        expected[page, :, 0, offset], expected[page, :, 1, offset] = k[token], v[token]
    np.testing.assert_array_equal(token_major(written), expected)


def test_what_lies_behind_the_last_token_is_never_read():
    """A page's stale part may hold anything, NaN included."""
    pages, q, k, v, table = build_step([1, 20], [18, 37])
    poisoned = np.full_like(pages, np.nan)
    valid = token_major(pages)
    for row, length in enumerate([18, 37]):
        for position in range(length):
            page, offset = np.asarray(table.page_indices)[row, position // 16], position % 16
            poisoned[page, :, 1, offset] = valid[page, :, 1, offset]
            poisoned[page, :, 0].reshape(KV_HEADS, 32, 16)[..., offset] = valid[page, :, 0, offset]

    _, out = attend(poisoned, q, k, v, table)

    np.testing.assert_array_equal(out, attend(pages, q, k, v, table)[1])


@pytest.mark.parametrize("window", [None, 20])
def test_a_query_is_the_same_to_the_bit_in_any_batch_and_chunk(window):
    """A prompt at once, in chunks, token by token and beside others gives identical numbers."""
    length = 200
    pages, q, k, v, table = build_step([length], [length])
    whole = attend(pages, q, k, v, table, window=window)[1]

    def in_chunks(size):
        held, outputs = pages, []
        for first in range(0, length, size):
            past = min(length, first + size)
            chunk = PageTable(
                jnp.asarray([past], jnp.int32),
                table.page_indices,
                jnp.asarray([0, past - first], jnp.int32),
                table.num_seqs,
            )
            held, out = attend(held, q[first:past], k[first:past], v[first:past], chunk, window=window)
            outputs.append(out)
        return np.concatenate(outputs)

    np.testing.assert_array_equal(in_chunks(1), whole)
    np.testing.assert_array_equal(in_chunks(33), whole)


def test_bfloat16_pages_hold_rounded_keys_and_values():
    """A pool of bfloat16's bits gives what a float32 pool of the same rounded numbers gives."""
    pages, q, k, v, table = build_step([1, 20], [50, 37])
    rounded = [np.asarray(jnp.asarray(x).astype(jnp.bfloat16)) for x in (pages, k, v)]

    written, out = attend(rounded[0].view(np.uint16), q, k, v, table)
    expected, exact = attend(*(x.astype(np.float32) for x in (rounded[0], q, *rounded[1:])), table)

    np.testing.assert_array_equal(out, exact)
    np.testing.assert_array_equal(written.view(rounded[0].dtype).astype(np.float32), expected)


def test_the_pool_is_not_copied():
    """A compiled step gives back the very pages it was given, and needs no memory that grows with them."""

    def scratch(num_pages):
        _, q, k, v, table = build_step([1, 40], [9, 60])
        turn = np.zeros((41, 1, 16), np.float32)
        pool = jax.ShapeDtypeStruct((num_pages, KV_HEADS, 2, 16, 32), np.float32)
        step = jax.jit(cpu_attention.paged_attention, static_argnames=("sm_scale", "sliding_window"), donate_argnums=0)
        analysis = (
            step.lower(pool, q, k, v, turn, turn, table, sm_scale=1.0, sliding_window=None).compile().memory_analysis()
        )
        assert analysis.alias_size_in_bytes == num_pages * KV_HEADS * 2 * 16 * 32 * 4
        return analysis.temp_size_in_bytes

    assert scratch(8192) == scratch(64)
