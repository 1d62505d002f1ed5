"""Attention on a TPU: our arguments against the plain twin of jax's kernel, and the kernel against the compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from compiled_attention import assert_compiles_in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import padded_table, without_what_windows_have_passed
from tpu_twins import plain_twin

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from caching.attention.xla_attention import XLAAttention
from caching.page_dtype import as_read, as_stored, rounded
from caching.tpu import jax_attention
from caching.tpu.jax_attention import TPUAttention, block_pages, stored_heads
from caching.tpu.pallas_attention import PallasAttention
from caching.tpu.tpu_chip import CHIPS, LANES
from caching.tpu.tpu_kernels import JAX
from engine import build, served_model
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.step import backend_choice
from engine.step.backend_choice import choose_backend, default_page_size, tpu_backend, tpu_kernel, xla_backend

V5E = CHIPS["TPU v5 lite"]
BFLOAT16 = np.dtype(jnp.bfloat16)
PAGE_SIZE, PAGES_PER_SEQ, TOKENS, ROWS = 8, 4, 24, 4


@st.composite
def ragged_steps(draw):
    """Lengths of a step's rows: (queries, tokens) each, those of a single query first."""
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 5]), st.sampled_from([0, 19])), min_size=1, max_size=ROWS))
    return sorted((queries, queries + before) for queries, before in rows)


def build_step(rows, *, heads, kv_heads, head_dim, dtype, seed):
    """Random q, k, v of a step, its table, and pools of the same random pages, one for the kernel and one for XLA."""
    rng = np.random.default_rng(seed)
    q_lens, kv_lens = zip(*rows, strict=True)
    page_indices = rng.permutation(np.arange(1, 1 + ROWS * PAGES_PER_SEQ)).reshape(ROWS, -1).astype(np.int32)
    table = padded_table(q_lens, kv_lens, page_indices)
    shapes = [(TOKENS, heads, head_dim), *[(TOKENS, kv_heads, head_dim)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    plain = rng.standard_normal((page_indices.size + 1, kv_heads, 2, PAGE_SIZE, head_dim))
    stored, wide = stored_heads(kv_heads, head_dim, np.dtype(dtype))
    padded = np.zeros((*plain.shape[:1], PAGE_SIZE, stored, 2, wide))
    padded[:, :, :kv_heads, :, :head_dim] = plain.transpose(0, 3, 1, 2, 4)
    pages = padded.reshape(*padded.shape[:2], 2 * stored, wide)
    return q, k, v, table, jnp.asarray(pages, dtype), jnp.asarray(plain, dtype)


@pytest.mark.parametrize(
    "kv_dtype",
    [
        pytest.param(np.dtype(jnp.float8_e4m3fn), id="e4m3fn", marks=pytest.mark.thorough),
        pytest.param(np.dtype(jnp.float8_e5m2), id="e5m2", marks=pytest.mark.thorough),
    ],
)
def test_pages_of_8_bits_are_attended_as_by_xla(kv_dtype):
    """What is written is the same, too large numbers included, and the kernel's plain twin reads it as ours does."""
    rows = [(1, 1), (1, 20), (5, 24)]
    q, k, v, table, pages, plain = build_step(rows, heads=4, kv_heads=2, head_dim=128, dtype=jnp.float32, seed=1)
    q, k, v, pages = (
        q.astype(jnp.bfloat16),
        k.astype(jnp.bfloat16),
        v.at[0].multiply(1e5).astype(jnp.bfloat16),
        rounded(pages, kv_dtype),
    )

    spec, inputs = AttentionSpec(0.3), AttentionInputs(q, k, v)
    written, out = TPUAttention(V5E, plain_twin)(spec, CacheView(pages, table), inputs)

    plainly, expected = _by_xla(kv_dtype, spec, CacheView(as_stored(plain, kv_dtype), table), inputs)
    np.testing.assert_allclose(np.float32(out[:7]), np.float32(expected[:7]), atol=2e-2, rtol=2e-2)
    read = np.float32(written[1:]).reshape(-1, PAGE_SIZE, 2, 2, 128).transpose(0, 2, 3, 1, 4)
    assert (read == as_read(plainly[1:], kv_dtype, np.dtype(np.float32))).all()


@partial(jax.jit, static_argnums=(0, 1))
def _by_xla(kv_dtype, spec, view, inputs):
    return XLAAttention(kv_dtype)(spec, view, inputs)


@pytest.mark.thorough
@settings(max_examples=max(2, settings.default.max_examples // 30))
@given(
    rows=ragged_steps(),
    case=st.sampled_from([(4, 2, 128, jnp.bfloat16), (6, 3, 64, jnp.float32)]),
    spec=st.sampled_from([AttentionSpec(0.3), AttentionSpec(0.3, 6, 1.5)]),
    seed=st.integers(0, 99),
)
def test_what_the_kernel_is_given_means_what_ours_does(rows, case, spec, seed):
    """The kernel's plain twin, fed by us, agrees with our attention on ragged batches, whatever had to be padded."""
    heads, kv_heads, head_dim, dtype = case
    q, k, v, table, pages, plain = build_step(
        rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=seed
    )

    inputs = AttentionInputs(q, k, v)
    written, out = TPUAttention(V5E, plain_twin)(spec, CacheView(pages, table), inputs)

    plainly, expected = _by_xla(plain.dtype, spec, CacheView(as_stored(plain, plain.dtype), table), inputs)
    real = int(table.cu_q_lens[-1])
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.float32(out[:real]), np.float32(expected[:real]), atol=tolerance, rtol=tolerance)
    read = written[1:].reshape(-1, PAGE_SIZE, pages.shape[2] // 2, 2, pages.shape[3])[
        :, :, : k.shape[1], :, : k.shape[2]
    ]
    assert (read.transpose(0, 2, 3, 1, 4) == as_read(plainly[1:], plain.dtype, plain.dtype)).all()


def test_pages_that_a_window_has_passed_are_never_read():
    """The kernel reads every page of its table: what windows have passed, with the sink's NaN, is not in it."""
    q, k, v, table, pages, plain = build_step(
        [(1, 20), (1, 31), (5, 29)], heads=4, kv_heads=2, head_dim=128, dtype=jnp.float32, seed=2
    )
    spec, inputs = AttentionSpec(0.3, 6), AttentionInputs(q, k, v)
    passed = without_what_windows_have_passed(spec, CacheView(plain, table)).table

    _, out = TPUAttention(V5E, plain_twin)(spec, CacheView(pages.at[0].set(jnp.nan), passed), inputs)

    expected = TPUAttention(V5E, plain_twin)(spec, CacheView(pages, table), inputs)[1]
    np.testing.assert_array_equal(out[:7], expected[:7])


@settings(max_examples=max(2, settings.default.max_examples // 50))
@given(rows=ragged_steps(), seed=st.integers(0, 99), most=st.integers(1, 3))
def test_rows_are_computed_in_as_many_calls_as_scalar_memory_needs(rows, seed, most):
    """At the edges of blocks too, in whose order tokens that a call gives behind its own are overwritten."""
    q, k, v, table, pages, _ = build_step(rows, heads=4, kv_heads=2, head_dim=128, dtype=jnp.float32, seed=seed)
    spec, inputs = AttentionSpec(0.3, 6), AttentionInputs(q, k, v)
    attend = jax.jit(TPUAttention(V5E, _by_xla_over_jaxs_pages), static_argnums=0)
    whole = attend(spec, CacheView(pages, table), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_attention, "TABLE_BYTES", 4 * LANES * most)
        in_blocks = jax.jit(TPUAttention(V5E, _by_xla_over_jaxs_pages), static_argnums=0)
        blocks = in_blocks(spec, CacheView(pages, table), inputs)

    real = int(table.cu_q_lens[-1])
    np.testing.assert_array_equal(whole[0], blocks[0])
    np.testing.assert_allclose(whole[1][:real], blocks[1][:real], atol=1e-6)


def _by_xla_over_jaxs_pages(q, kv_pages, *table, sm_scale, sliding_window, soft_cap, **_):
    """What stands in for jax's kernel where it is traced."""
    num_pages, page_size, combined, head_dim = kv_pages.shape
    pages = kv_pages.reshape(num_pages, page_size, combined // 2, 2, head_dim).transpose(0, 2, 3, 1, 4)
    lens, indices, begins, count = table
    view = CacheView(as_stored(pages, pages.dtype), PageTable(lens, indices, begins, count))
    return XLAAttention(pages.dtype)(
        AttentionSpec(sm_scale, sliding_window, soft_cap), view, AttentionInputs(q, None, None)
    )[1]


def test_sinks_are_refused_with_what_to_choose_instead():
    """jax's kernel has none; ours and XLA's do."""
    q, k, v, table, pages, _ = build_step([(1, 1)], heads=4, kv_heads=2, head_dim=128, dtype=jnp.float32, seed=0)

    with pytest.raises(ValueError, match="choose attention_backend pallas or xla"):
        TPUAttention(V5E, plain_twin)(
            AttentionSpec(0.3), CacheView(pages, table), AttentionInputs(q, k, v, sinks=jnp.zeros(4))
        )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8, 128, jnp.bfloat16), (8, 128)),
        ((1, 128, jnp.bfloat16), (1, 128)),
        ((2, 64, jnp.bfloat16), (2, 128)),
        ((3, 80, jnp.bfloat16), (4, 128)),
        ((12, 64, jnp.bfloat16), (16, 128)),
        ((40, 128, jnp.bfloat16), (40, 128)),
        ((8, 256, jnp.bfloat16), (8, 256)),
        ((3, 64, jnp.float32), (4, 128)),
    ],
)
def test_heads_are_padded_to_what_the_kernel_can_tile(given, expected):
    """Head counts and widths that are whole registers stay as they are, others grow to the next that are."""
    kv_heads, head_dim, dtype = given

    assert stored_heads(kv_heads, head_dim, np.dtype(dtype)) == expected


@pytest.mark.parametrize(
    ("kind", "kv_heads", "page_size", "pages_per_seq", "pages"),
    [
        ("TPU v5 lite", 8, 128, 64, 3),
        ("TPU v6 lite", 8, 128, 64, 5),
        ("TPU v5 lite", 8, 128, 2, 2),
        ("TPU v5 lite", 1, 16, 512, 16),
        ("TPU v5 lite", 64, 128, 64, 1),
    ],
)
def test_a_block_keeps_the_memory_busy_and_is_no_longer(kind, kv_heads, page_size, pages_per_seq, pages):
    """Narrow heads and fast memory read more pages at once; never more than a sequence has, nor than 16."""
    pool = jax.ShapeDtypeStruct((1, page_size, 2 * kv_heads, 128), jnp.bfloat16)

    assert block_pages(CHIPS[kind], pool, pages_per_seq) == pages


def test_a_page_table_that_the_kernel_has_no_room_for_is_refused(tmp_path, monkeypatch):
    """Before any weight is read, naming what to change."""
    directory = build_checkpoint(tmp_path, "mistral", max_position_embeddings=2**19)

    monkeypatch.setattr(served_model, "choose_backend", lambda *_, **__: tpu_backend(V5E, JAX))
    monkeypatch.setattr(served_model, "checked", lambda trial, *_, **__: trial.backend)

    with pytest.raises(ConfigurationError, match=r"has room for 245,760 pages .* not for 262,144: raise page_size"):
        build.build_engine(
            EngineConfig(model=directory, max_num_seqs=2, page_size=1, num_pages=2**19, max_model_len=2**18),
            lambda progress: None,
        )


def test_a_tpu_is_served_by_a_kernel(monkeypatch):
    """Where JAX finds a TPU that is known to us; on another XLA serves, and says so. Pages are longer on both."""

    def choose(kind, kv_dtype=BFLOAT16, asked="auto"):
        device = type("Device", (), {"device_kind": kind})()
        monkeypatch.setattr(backend_choice.jax, "devices", lambda: [device])
        return choose_backend(128, 64, kv_dtype, 1, 8, asked)

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    chip = CHIPS["TPU v6 lite"]

    assert choose("TPU v6 lite").attention == PallasAttention(chip)
    assert choose("TPU v6 lite", asked="jax").attention == TPUAttention(chip)
    assert choose("TPU v6 lite", asked="xla").attention == xla_backend(BFLOAT16).attention
    assert choose("TPU v2").attention == xla_backend(BFLOAT16).attention and "TPU v2" in choose("TPU v2").description
    assert default_page_size() == 128
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype int8 .*: choose fp8, or attention_backend xla$"):
        choose("TPU v6 lite", np.dtype(np.int8))
    with pytest.raises(ConfigurationError, match=r"attention_backend pallas is for TPU v4, .* not for TPU v2"):
        choose("TPU v2", asked="pallas")


@pytest.mark.parametrize(
    ("page_size", "asked", "extras", "remedy"),
    [
        (17, "auto", "sinks", "page_size 17 is no multiple of 16: choose one that is, or attention_backend xla"),
        (17, "pallas", None, "page_size 17 is no multiple of 16: choose one that is, or attention_backend xla"),
        (128, "jax", "sinks", "it has no sinks: choose auto or xla"),
    ],
)
def test_what_no_kernel_reads_is_refused_with_its_own_remedy(page_size, asked, extras, remedy):
    """Another dtype helps no page of the wrong size."""
    with pytest.raises(ConfigurationError) as refused:
        tpu_kernel(CHIPS["TPU v5 lite"], page_size, 8, 128, BFLOAT16, asked, extras=extras)

    assert str(refused.value).endswith(f"cannot serve this model on a TPU: {remedy}")


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page_size", "kv_dtype", "first"),
    [
        (1, 128, 128, BFLOAT16, "pallas"),  # jax's kernel reads 2,048 tokens at once
        (8, 128, 128, BFLOAT16, "pallas"),
        (2, 64, 128, BFLOAT16, "pallas"),  # and heads padded to twice their width
        (40, 128, 128, BFLOAT16, "pallas"),
        (64, 128, 128, np.dtype(jnp.float8_e4m3fn), "jax"),  # a page is a block, and a granule has 32 tokens
        (8, 128, 8, BFLOAT16, "jax"),  # no whole granule
    ],
)
def test_the_kernel_that_moves_fewest_bytes_serves(kv_heads, head_dim, page_size, kv_dtype, first):
    """Pages that are read, and what a token's way into its page takes, over rows of all lengths."""
    assert tpu_kernel(V5E, page_size, kv_heads, head_dim, kv_dtype).name == first


@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kv_dtype"),
    [
        (32, 8, 128, jnp.bfloat16),
        (14, 2, 64, jnp.bfloat16),
        (32, 8, 128, jnp.float8_e4m3fn),
        (14, 2, 64, jnp.float8_e5m2),
    ],
)
def test_the_kernel_compiles_and_copies_no_pages(topology, heads, kv_heads, head_dim, kv_dtype):
    """For a chip that is not there: the pages are written in place, and scratch does not grow with them."""
    pytest.importorskip("libtpu")

    assert_compiles_in_place(JAX, topology, heads, kv_heads, head_dim, kv_dtype)
