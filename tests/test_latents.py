"""Latent attention: over pages against plain attention of expanded keys, and what a model says of its latents."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from loading import FLOAT32, load
from plain_attention import expanded, padded_table, plain_attention

from caching.attention.latent_projections import LatentFactors, LatentProjections
from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, LatentInputs, LatentSpec, PageTable
from caching.attention.xla_latents import XLALatentAttention, _Heads, _Prompts, _Row
from caching.metadata import PagedAttentionCacheMetaData
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import LATENTS
from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.memory.number_formats import page_dtype
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.published.dequantised import Dequantised
from engine.models.weights.published.fp8 import fp8
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import load_decoder
from engine.planner.topology import chips_of
from engine.step.backend_choice import choose_backend, tpu_kernel, xla_backend
from engine.step.compilation import lower

HEADS, NOPE, ROPE, VALUES, PAGE_SIZE, PAGES_PER_SEQ = 3, 8, 4, 6, 4, 60
SCALE = 0.3
EXPANDS, ABSORBS = 64, 6
"""Ranks with which rows of 8 new tokens and more are expanded, and only new rows."""
_by_xla = jax.jit(XLALatentAttention(widens=True), static_argnums=0)


def build_step(q_lens, kv_lens, rank, *, rows, tokens, dtype=np.float32, width=None, seed=0):
    """Random inputs and pages, and a table for rows of these lengths, padded to ``rows`` and ``tokens``.

    What nobody has written is NaN: the sink, and a row's last page behind its last token.
    """
    rng = np.random.default_rng(seed)
    num_pages = 1 + sum(-(-length // PAGE_SIZE) for length in kv_lens)
    free = list(rng.permutation(np.arange(1, num_pages)))
    page_indices = np.zeros((rows, PAGES_PER_SEQ), np.int32)
    pages = rng.standard_normal((num_pages, 1, 1, PAGE_SIZE, width or rank + ROPE), np.float32)
    pages[0] = np.nan
    for row, length in enumerate(kv_lens):
        for column in range(-(-length // PAGE_SIZE)):
            page_indices[row, column] = free.pop()
        if length % PAGE_SIZE:
            pages[page_indices[row, length // PAGE_SIZE], ..., length % PAGE_SIZE :, :] = np.nan
    table = padded_table(q_lens, kv_lens, page_indices)
    shapes = (tokens, HEADS, NOPE), (tokens, HEADS, ROPE), (tokens, rank + ROPE), (HEADS, NOPE + VALUES, rank)
    *tokens_of, base = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    inputs = LatentInputs(*tokens_of, LatentProjections(base / np.array(rank**0.5, dtype), NOPE))
    return inputs, CacheView(jnp.asarray(pages, dtype), table)


def plain(inputs: LatentInputs, view: CacheView, first: int = 0):
    """f64[real tokens, heads, v] by plain attention over the keys and values that pages' latents stand for."""
    width = inputs.latents.shape[1]
    keys_and_values = expanded(jnp.asarray(view.pages)[:, 0, 0, :, :width], inputs.projections.base, NOPE)
    pages = jnp.stack([x.swapaxes(1, 2) for x in keys_and_values], axis=2)
    k, v = expanded(inputs.latents, inputs.projections.base, NOPE)
    q = jnp.concatenate([inputs.q, inputs.q_rotated], axis=-1)
    _, out = plain_attention(AttentionSpec(SCALE, first=first), CacheView(pages, view.table), AttentionInputs(q, k, v))
    return out[..., :VALUES]


@pytest.mark.parametrize("rank", [EXPANDS, ABSORBS])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "rows", "tokens"),
    [
        pytest.param([1], [1], 1, 1, marks=pytest.mark.thorough),
        pytest.param([1, 1, 1], [3, 130, 64], 4, 4, marks=pytest.mark.thorough),
        ([1, 1, 70, 65, 3, 130], [9, 200, 70, 190, 4, 131], 8, 512),
        pytest.param([1], [200], 1, 1, marks=pytest.mark.thorough),
        pytest.param([5], [5], 8, 8, marks=pytest.mark.thorough),
        pytest.param([100], [230], 4, 128, marks=pytest.mark.thorough),
        pytest.param([1, 2], [64, 2], 4, 4, marks=pytest.mark.thorough),
        pytest.param([63, 64, 1], [63, 65, 130], 3, 128, marks=pytest.mark.thorough),
        pytest.param([128, 4, 128], [128, 160, 224], 3, 260, marks=pytest.mark.thorough),
    ],
)
def test_it_is_attention_over_the_keys_and_values_that_latents_stand_for(q_lens, kv_lens, rows, tokens, rank):
    """Absorbed or expanded, whatever the mix of rows and their lengths; padding is finite."""
    inputs, view = build_step(q_lens, kv_lens, rank, rows=rows, tokens=tokens)

    _, actual = _by_xla(LatentSpec(SCALE, rank), view, inputs)

    expected = plain(inputs, view)
    np.testing.assert_allclose(actual[: len(expected)], expected, atol=5e-6)
    assert np.isfinite(actual).all()


@pytest.mark.parametrize(
    "rank", [pytest.param(EXPANDS, marks=pytest.mark.thorough), pytest.param(ABSORBS, marks=pytest.mark.exhaustive)]
)
def test_the_first_token_is_seen_by_itself_alone(rank):
    """As in a layer that predicts further tokens: in decoding rows, new prompts and later chunks."""
    inputs, view = build_step([1, 1, 1, 70, 65, 3], [1, 2, 200, 70, 190, 4], rank, rows=8, tokens=256)

    _, actual = _by_xla(LatentSpec(SCALE, rank, first=1), view, inputs)

    expected = plain(inputs, view, first=1)
    np.testing.assert_allclose(actual[: len(expected)], expected, atol=5e-6)
    assert np.abs(expected[1:] - plain(inputs, view)[1:]).max() > 0.1


@pytest.mark.parametrize("rank", [EXPANDS, pytest.param(ABSORBS, marks=pytest.mark.thorough)])
def test_a_row_of_nan_is_nobody_elses(rank):
    """Neither its queries nor its latents reach another row, in decoding rows and in tiles that hang over."""
    q_lens = [1, 1, 70, 65, 3]
    inputs, view = build_step(q_lens, [9, 200, 70, 190, 4], rank, rows=8, tokens=256)
    begins = np.cumsum([0, *q_lens])
    is_poisoned = np.zeros((256, 1, 1), bool)
    is_poisoned[[0, *range(begins[2], begins[3])]] = True
    poisoned = replace(
        inputs,
        q=jnp.where(is_poisoned, np.float32(np.nan), inputs.q),
        latents=jnp.where(is_poisoned[..., 0], np.float32(np.nan), inputs.latents),
    )

    _, clean = _by_xla(LatentSpec(SCALE, rank), view, inputs)
    _, actual = _by_xla(LatentSpec(SCALE, rank), view, poisoned)

    others = [1, *range(begins[3], begins[5])]
    np.testing.assert_array_equal(actual[np.array(others)], clean[np.array(others)])
    assert np.isnan(actual[0]).all() and np.isnan(actual[begins[3] - 1]).all()


@pytest.mark.parametrize("rank", [EXPANDS, pytest.param(ABSORBS, marks=pytest.mark.thorough)])
def test_each_row_has_the_projections_of_its_own_adapter(rank):
    """Decoding rows, new prompts and later chunks, of two slots and of none."""
    q_lens, slots, lora = [1, 1, 1, 70, 65, 3], [1, -1, 0, 1, 0, -1], 3
    inputs, view = build_step(q_lens, [9, 40, 200, 70, 190, 4], rank, rows=8, tokens=256)
    rng, base = np.random.default_rng(1), inputs.projections.base
    low, high = rng.standard_normal((2 * lora, rank)) / rank**0.5, rng.standard_normal((*base.shape[:2], 2 * lora))
    of_tokens = np.full(256, -1)
    of_tokens[: sum(q_lens)] = np.repeat(slots, q_lens)
    is_own = np.arange(2 * lora)[None] // lora == of_tokens[:, None]
    factors = LatentFactors(*(jnp.asarray(x, jnp.float32) for x in (low, high)), jnp.asarray(is_own))
    adapted = replace(inputs, projections=replace(inputs.projections, factors=factors))

    _, actual = _by_xla(LatentSpec(SCALE, rank), view, adapted)

    for slot in (-1, 0, 1):
        own, rows = slice(lora * slot, lora * (slot + 1)), np.flatnonzero(of_tokens[: sum(q_lens)] == slot)
        merged = base if slot < 0 else base + high[..., own] @ low[own]
        expected = plain(replace(inputs, projections=LatentProjections(merged, NOPE)), view)
        np.testing.assert_allclose(actual[rows], expected[rows], atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("keys_a_turn", [256, 8192])
def test_a_turn_may_have_more_keys_of_each_row(keys_a_turn):
    """Blocks of any length give what short ones give; the last one hangs over the table."""
    inputs, view = build_step([1, 1, 1, 5], [3, 130, 239, 64], EXPANDS, rows=4, tokens=8)
    attention = XLALatentAttention(widens=True, keys_a_turn=keys_a_turn)

    _, actual = jax.jit(attention, static_argnums=0)(LatentSpec(SCALE, EXPANDS), view, inputs)

    np.testing.assert_allclose(actual, plain(inputs, view), atol=5e-6)


@pytest.mark.thorough
def test_pages_may_be_wider_than_latents_and_in_bits_of_bfloat16():
    """As a TPU's and a CPU's are: numbers behind the latents are written as zeros and not read."""
    inputs, view = build_step([1, 20], [30, 40], EXPANDS, rows=4, tokens=32, dtype=jnp.bfloat16, width=80)
    bits = replace(view, pages=jax.lax.bitcast_convert_type(view.pages, jnp.uint16))

    pages, actual = _by_xla(LatentSpec(SCALE, EXPANDS), view, inputs)
    stored, same = _by_xla(LatentSpec(SCALE, EXPANDS), bits, inputs)

    expected = plain(
        jax.tree.map(lambda x: x.astype(jnp.float32), inputs), replace(view, pages=view.pages.astype(jnp.float32))
    )
    np.testing.assert_allclose(actual[: len(expected)].astype(np.float32), expected, atol=0.05)
    np.testing.assert_array_equal(actual, same)
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(pages, jnp.uint16), stored)
    last = view.table.page_indices[1, 39 // PAGE_SIZE]
    np.testing.assert_array_equal(pages[last, 0, 0, 3], jnp.pad(inputs.latents[20], (0, 80 - EXPANDS - ROPE)))


def test_the_way_of_fewer_products_is_taken():
    """By the rows' lengths: a new prompt and a long chunk are expanded, a short chunk is absorbed."""
    taken = jax.jit(
        lambda count, kv_len: _Prompts(heads, 4, ())._is_cheaper_expanded(
            _Row(jnp.int32(0), count, kv_len, jnp.zeros((1, 1), jnp.int32))
        )
    )
    inputs, view = build_step([1], [1], 512, rows=1, tokens=1)
    wide = replace(inputs, latents=jnp.zeros((1, 576)), projections=LatentProjections(jnp.zeros((1, 256, 512)), 128))
    heads = _Heads(LatentSpec(SCALE, 512), view.pages, view.table, wide)

    expands = {
        (count, kv_len): bool(taken(count, kv_len))
        for count, kv_len in ((2, 2), (100, 100), (170, 2**30), (171, 2**30), (100, 150), (100, 1000), (1, 5))
    }

    assert expands == {
        (2, 2): True,
        (100, 100): True,
        (170, 2**30): False,
        (171, 2**30): True,
        (100, 150): True,
        (100, 1000): False,
        (1, 5): False,
    }


def test_a_latent_is_cached_once_for_all_heads_and_on_every_device(tmp_path):
    """A page has no second vector and no heads, however many devices split the model."""
    model = read_model_config(build_checkpoint(tmp_path, "deepseek_v3"))

    alone, four = (
        xla_backend(np.dtype(np.float32), latents=True).one_page(split(model, n), 16, np.dtype(np.float32))
        for n in (1, 4)
    )

    assert model.has_latents and model.head_dim == 64 + 8
    assert alone == four
    assert alone.bytes_per_page == 3 * 16 * (64 + 8) * 4


def test_a_tpu_has_latents_in_whole_registers():
    """So that the pool takes what is planned for it: XLA would pad them unseen."""
    chip, bfloat16 = CHIPS["TPU v5 lite"], np.dtype(jnp.bfloat16)

    kernel = tpu_kernel(chip, 128, 1, 576, bfloat16, latents=True)

    assert kernel.stored_heads(1, 576, bfloat16) == (1, 640)
    with pytest.raises(ConfigurationError, match="attention_backend pallas cannot read the latents"):
        tpu_kernel(chip, 128, 1, 576, bfloat16, "pallas", latents=True)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "fp8_e5m2"])
def test_latents_of_8_bits_are_refused(tmp_path, kv_cache_dtype):
    """By name, when the daemon starts."""
    model = read_model_config(build_checkpoint(tmp_path, "deepseek_v3"))

    with pytest.raises(ConfigurationError, match=f"kv_cache_dtype {kv_cache_dtype} is not supported for latents"):
        page_dtype(EngineConfig(kv_cache_dtype=kv_cache_dtype), model, np.dtype(np.float32))


def test_a_cpu_says_that_its_kernels_do_not_attend():
    """Matrix products by them, attention by XLA."""
    backend = choose_backend(16, 576, np.dtype(np.float32), latents=True)

    assert backend.attention == XLALatentAttention(widens=True)
    assert "attention by XLA: it has none for latents" in backend.description or "kernels" not in backend.description


def test_layers_that_predict_further_tokens_are_not_served(tmp_path):
    """They are named; a layer more is refused."""
    build_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    stored = random_tensors(VARIANTS["deepseek_v3"].config, VARIANTS["deepseek_v3"].seed)
    write_tensors(tmp_path, {**stored, "model.layers.3.eh_proj.weight": np.ones((4, 4), np.float32)})

    assert load(tmp_path).partition.model.unserved == (("model.layers.3.", "layers that predict further tokens"),)

    write_tensors(tmp_path, {**stored, "model.layers.4.eh_proj.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(ConfigurationError, match=r"layers\.4\.eh_proj"):
        load(tmp_path)


BLOCK = 16
BLOCKS_OF_FP8 = fp8({"weight_block_size": [BLOCK, BLOCK]})


def in_blocks_of_fp8(tensors):
    """A checkpoint's tensors as DeepSeek-V3 stores them, and those that they stand for."""
    rng, stored, meant = np.random.default_rng(0), dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("proj.weight", "mqa.weight")):
            scales = rng.uniform(0.01, 0.1, [-(-size // BLOCK) for size in tensor.shape]).astype(np.float32)
            each = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
            numbers = (tensor / each).astype(ml_dtypes.float8_e4m3fn)
            stored |= {name: numbers, f"{name}_scale_inv": scales}
            meant[name] = numbers.astype(np.float32) * each
    return stored, meant


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_projections_in_blocks_of_fp8_are_read_as_what_they_stand_for(tmp_path, devices):
    """As DeepSeek-V3 is published: blocks go over the ends of heads, and devices have heads of their own."""
    model = read_model_config(build_checkpoint(tmp_path, "deepseek_v3"))
    stored, meant = in_blocks_of_fp8(random_tensors(VARIANTS["deepseek_v3"].config, 4))
    published = Dequantised(Arrays(stored), BLOCKS_OF_FP8)
    mesh, partition = DeviceMesh(tuple(jax.devices()[:devices])), split(model, devices)

    read, expected = (
        load_decoder(source, partition, FLOAT32, mesh=mesh, progress=lambda done, total: None)
        for source in (published, Arrays(meant))
    )

    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(expected))
    kv_b = np.asarray(read.layers[1].mixer.kv_b[...]).reshape(-1, 64)
    np.testing.assert_array_equal(kv_b, meant["model.layers.1.self_attn.kv_b_proj.weight"])


@pytest.mark.parametrize("tokens", [64, 512])
def test_on_a_tpu_pages_are_written_in_place_and_gathered_blocks_stay_on_the_chip(tokens):
    """For a chip that is not there: scratch is smaller than the block of latents of a turn, and no page is copied."""
    pytest.importorskip("libtpu")
    chip, bfloat16 = chips_of("v5e:2x2")[0], np.dtype(jnp.bfloat16)
    pool = PagedAttentionCacheMetaData(
        num_layers=4,
        num_pages=512,
        page_size=128,
        num_kv_heads=1,
        head_dim=640,
        dtype=bfloat16,
        vectors=1,
        stacked=True,
    )
    (pages,) = jax.eval_shape(lambda: LATENTS.allocate(pool)).layers
    table = PageTable(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in ((64,), (64, 64), (65,), (1,))))
    shapes = (tokens, 4, 128), (tokens, 4, 64), (tokens, 576), (4, 256, 512)
    inputs = [jax.ShapeDtypeStruct(shape, bfloat16) for shape in shapes]

    def step(pages, table, *inputs):
        attention, (*of_tokens, base) = LATENTS.attention(CHIPS[chip.device_kind]), inputs
        inputs = LatentInputs(*of_tokens, LatentProjections(base, 128))
        return attention(LatentSpec(0.1, 512), CacheView(pages, table), inputs)

    compiled = lower(step, *DeviceMesh((chip,)).shapes((pages, table, *inputs)), donate=0).compile()

    sizes = compiled.memory_analysis()
    assert sizes.alias_size_in_bytes == pool.num_bytes
    assert sizes.temp_size_in_bytes < 64 * 128 * 640 * 2


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path):
    """The same config.json but for its model_type makes the same model."""
    one = read_model_config(build_checkpoint(tmp_path / "deepseek", "deepseek_v3"))
    other = read_model_config(build_checkpoint(tmp_path / "kimi", "deepseek_v3", model_type="kimi_k2"))

    assert one == other


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "there is no num_experts_per_tok"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; supported: 4"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 4 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "wide", "sparse", "sparse"]}, "mlp_layer_types 'wide'"),
    ],
)
def test_what_latent_attention_cannot_be_is_refused(tmp_path, variant, given, message):
    """By the key of config.json."""
    with pytest.raises(ConfigurationError, match=message):
        read_model_config(build_checkpoint(tmp_path, variant, **given))
