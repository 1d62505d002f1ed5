"""The CPU's own attention against the plain twin, and what it promises besides: in place, and the same in any batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_needed import kernels_needed
from plain_attention import padded_table, plain_attention, without_what_windows_have_passed

from caching.attention import cpu_attention
from caching.attention.cpu_attention import CPUAttention
from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from engine.models.rope import rotate

with kernels_needed():
    WIDTH = cpu_attention.vector_width()

KV_HEADS, PAGES_PER_SEQ = 2, 40
SPEC = AttentionSpec(0.3)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(spec, pages, table, inputs):
    return CPUAttention()(spec, CacheView(pages, table), inputs)


def build_step(q_lens, kv_lens, *, group=3, head_dim=32, page_size=16, padding=0, seed=0):
    """Random q, k, v and pages for rows of these lengths, with so many rows and tokens of padding behind them."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    free = iter(rng.permutation(np.arange(1, 1 + sum(counts))))
    page_indices = np.zeros((len(q_lens) + padding, PAGES_PER_SEQ), np.int32)
    for row, count in enumerate(counts):
        page_indices[row, :count] = [next(free) for _ in range(count)]
    table = padded_table(q_lens, kv_lens, page_indices)
    tokens = sum(q_lens) + padding
    shapes = [(tokens, KV_HEADS * group, head_dim), *[(tokens, KV_HEADS, head_dim)] * 2]
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    pages = rng.standard_normal((1 + sum(counts), KV_HEADS, 2, page_size, head_dim), np.float32)
    return pages, q, k, v, table


def attend(pages, q, k, v, table, *, angles=None, spec=SPEC, sinks=None):
    """Pages and output, as numpy arrays; nothing is turned where there are no angles f[tokens, 1, head_dim / 2]."""
    angles = np.zeros((len(q), 1, q.shape[2] // 2), np.float32) if angles is None else angles
    pages, q, k, v, cos, sin = map(jnp.array, (pages, q, k, v, np.cos(angles), np.sin(angles)))
    written, out = _step(spec, pages, table, AttentionInputs(q, k, v, (cos, sin), sinks))
    return np.asarray(written), np.asarray(out)


def plainly(pages, q, k, v, table, *, spec=SPEC, sinks=None):
    """The same by the plain twin, without rotation."""
    view = CacheView(token_major(pages), table)
    return plain_attention(spec, view, AttentionInputs(q, k, v, sinks=sinks))


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
    ("window", "chunk"),
    [
        (None, None),
        (5, None),
        (None, 24),
        *(
            pytest.param(*reach, marks=pytest.mark.thorough)
            for reach in ((1, None), (140, None), (None, 1), (None, 64))
        ),
    ],
)
@pytest.mark.parametrize("step", STEPS)
def test_the_kernel_agrees_with_the_plain_twin(step, window, chunk):
    """Every real query gets what the plain twin gives it over the pages as written, whatever the mix of rows."""
    given, spec = build_step(*STEPS[step], padding=3), AttentionSpec(0.3, window, chunk=chunk)

    _, out = attend(*given, spec=spec)

    _, expected = plainly(*given, spec=spec)
    np.testing.assert_allclose(out[: len(expected)], expected, atol=3e-6)
    assert not out[len(expected) :].any()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_together_is_read_as_what_is_apart(dtype, group):
    """To the bit, in the pages too, with a rotation of some pairs alone."""
    pages, q, k, v, table = build_step(*STEPS["a mix"], padding=3, group=group)
    pages = pages if dtype == "float32" else np.asarray(jnp.asarray(pages).astype(dtype)).view(np.uint16)
    angles = np.random.default_rng(1).standard_normal((len(q), 1, 12)).astype(np.float32)
    together = np.concatenate([q.reshape(len(q), KV_HEADS, group, -1), k[:, :, None], v[:, :, None]], axis=2)

    apart, at_once = (
        _step(SPEC, jnp.array(pages), table, AttentionInputs(*map(jnp.asarray, (q, k, v)), turn, None, whole))
        for turn in [(jnp.cos(angles), jnp.sin(angles))]
        for whole in (None, jnp.asarray(together))
    )

    jax.tree.map(np.testing.assert_array_equal, at_once, apart)
    assert np.any(np.asarray(apart[1]) != 0)


@pytest.mark.thorough
@pytest.mark.parametrize("reach", [{}, {"window": 5}, {"chunk": 24}])
def test_keys_before_the_first_are_seen_by_themselves_alone(reach):
    """In decoding rows and in tiles, from a sequence's first token on."""
    spec = AttentionSpec(0.3, **reach, first=2)
    for q_lens, kv_lens in (([1, 1, 1, 1], [1, 2, 3, 130]), ([1, 1, 7, 65, 3], [1, 200, 7, 190, 4])):
        given = build_step(q_lens, kv_lens)

        _, out = attend(*given, spec=spec)

        _, expected = plainly(*given, spec=spec)
        np.testing.assert_allclose(out[: len(expected)], expected, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sinks", [None, np.linspace(-2, 3, 6, dtype=np.float32)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 0.7, 50.0])
def test_scores_are_capped_and_compete_with_sinks(soft_cap, sinks, window, dtype):
    """Over pages of both dtypes, in a window and without, for decoding rows and chunks."""
    spec = AttentionSpec(0.3, window, soft_cap)
    pages, q, k, v, table = build_step(*STEPS["a mix"], padding=3)
    pages, k, v = (np.asarray(jnp.asarray(x).astype(dtype)) for x in (pages, k, v))

    stored = pages if dtype == "float32" else pages.view(np.uint16)
    written, out = attend(stored, q, k, v, table, spec=spec, sinks=sinks)

    expected_pages, expected = plainly(pages, q, k, v, table, spec=spec, sinks=sinks)
    np.testing.assert_allclose(out[: len(expected)], expected, atol=3e-6)
    np.testing.assert_array_equal(token_major(written.view(pages.dtype)), expected_pages)


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

    _, out = attend(*step)

    np.testing.assert_allclose(out, plainly(*step)[1], atol=1e-5)


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


@pytest.mark.parametrize(("window", "chunk"), [(1, None), (20, None), (150, None), (None, 60)])
def test_pages_that_a_window_has_passed_are_never_read(window, chunk):
    """They are somebody else's by then, or the sink, whose NaN would show; in decoding rows and in tiles."""
    pages, q, k, v, table = build_step([1, 1, 70, 3], [18, 300, 190, 40])
    pages[0], spec = np.nan, AttentionSpec(0.3, window, chunk=chunk)
    passed = without_what_windows_have_passed(spec, CacheView(pages, table)).table

    _, out = attend(pages, q, k, v, passed, spec=spec)

    np.testing.assert_array_equal(out, attend(pages, q, k, v, table, spec=spec)[1])


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(0.3, 20), AttentionSpec(0.3, None, 2.0)], ids=str)
def test_a_query_is_the_same_to_the_bit_in_any_batch_and_chunk(spec):
    """A prompt at once, in chunks, token by token and beside others gives identical numbers."""
    length = 200
    pages, q, k, v, table = build_step([length], [length])
    whole = attend(pages, q, k, v, table, spec=spec)[1]

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
            held, out = attend(held, q[first:past], k[first:past], v[first:past], chunk, spec=spec)
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
        inputs = AttentionInputs(q, k, v, (turn, turn))
        analysis = _step.lower(SPEC, pool, table, inputs).compile().memory_analysis()
        assert analysis.alias_size_in_bytes == num_pages * KV_HEADS * 2 * 16 * 32 * 4
        return analysis.temp_size_in_bytes

    assert scratch(8192) == scratch(64)
