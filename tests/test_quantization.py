"""Weights and pages in 8 bits: how they are made, and what the model loses by them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from loading import load as load_checkpoint
from transformers import AutoTokenizer
from whole_rows import compute_logprobs

from caching.page_dtype import quantize
from engine.build import build_engine
from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh, one_device
from engine.hub.names import DEMO_MODEL
from engine.models.linear import linear, look_up
from engine.models.weights.forms import Dense, Scaled
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.store import abstract_decoder, parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.backend_choice import choose_backend

FLOAT32 = np.dtype(np.float32)
STORY = """Once upon a time, there was a giraffe named Barney who lived in a cottage under a tall oak tree. He had a good \
friend called Nina. One day, the two of them found a paper crown. "It is mine!" said Barney. "No, I saw it first!" said \
Nina. They both reached for the crown, and neither of them let go, until the crown fell into a puddle. Now nobody had \
anything, and they were sad. A busy beaver had seen it all. "What is more important, a thing or a friend?" asked the \
beaver. "I am sorry, Nina," said Barney. "I am sorry too," said Nina. Then the beaver folded two new crowns out of gold \
paper. And so Barney went home, happy and warm."""


def arrays_of(decoder):
    """The arrays of a decoder, or the shapes of them, by name; scales have their weight's name and _scale."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(decoder)):
        name, weight = ".".join(map(str, path)), variable.get_value()
        found[name] = weight.values if isinstance(weight, (Dense, Scaled)) else weight
        if isinstance(weight, Scaled):
            found[f"{name}_scale"] = weight.scales
    return found


def load(directory, devices=1, *, quantized, **forms):
    """The parameters of a checkpoint by name, in this form and on so many devices."""
    form = WeightFormat(FLOAT32, **forms, activations=FLOAT32 if quantized else None)
    decoder = load_checkpoint(directory, form, devices)
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    arrays, foretold = arrays_of(decoder), arrays_of(abstract_decoder(decoder.partition, form, mesh=mesh))
    for name, array in arrays.items():
        shape = foretold[name]
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding), name
    each = sum(array.addressable_shards[0].data.nbytes for array in arrays.values())
    assert each == parameter_bytes(decoder.partition, form)
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "variant", ["gemma2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama2", "llama_linear"))]
)
def test_weights_are_rounded_to_127_steps_of_an_output(tmp_path, variant):
    """Each to the nearest of its own output's; norms and biases stay as they are."""
    directory = build_checkpoint(tmp_path, variant)

    exact, rounded = load(directory, quantized=False), load(directory, quantized=True)

    assert {name.removesuffix("_scale") for name in rounded} == set(exact)
    for name, weight in exact.items():
        if f"{name}_scale" not in rounded:
            np.testing.assert_array_equal(rounded[name], weight)
            continue
        axis = 0 if name.endswith("_kernel") else 1
        scale = np.expand_dims(rounded[f"{name}_scale"], axis)
        assert rounded[name].dtype == np.int8 and (np.abs(rounded[name]).max(axis=axis) == 127).all()
        assert (np.abs(rounded[name] * scale - weight) <= 0.5001 * scale).all()


@pytest.fixture
def nothing_compiled_is_kept():
    """Of so many models the compiled functions would be more than a process can have (conftest.py)."""
    yield
    jax.clear_caches()


WITH_OTHER_KERNELS = ("gemma4", "gemma4_moe", "glm4_moe_lite", "gpt_oss", "granite_moe_shared", "llama2", "llama4")
WITH_OTHER_KERNELS += ("mimo_v2", "phi3", "phimoe", "qwen3_moe_plain")
WITH_OTHER_KERNELS += ("falcon_h1", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe")
"""Variants that have, together, every kind of kernel; those of all others are exhaustive."""


@pytest.mark.usefixtures("nothing_compiled_is_kept")
@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("glm4_moe", Layout.AXES),
        *(
            pytest.param(
                variant,
                layout,
                marks=pytest.mark.thorough
                if layout is Layout.PANELS and variant in WITH_OTHER_KERNELS
                else pytest.mark.exhaustive,
            )
            for layout in (Layout.AXES, Layout.PANELS)
            for variant in VARIANTS
            if VARIANTS[variant].stored == "float32" and (variant, layout) != ("glm4_moe", Layout.AXES)
        ),
    ],
)
def test_a_model_in_8_bits_is_the_model_of_the_rounded_weights(tmp_path, variant, layout):
    """Each family's log-probabilities, routers unrounded; by XLA and by the CPU's own kernel.

    A product is scaled behind its sum, which rounds otherwise, and random models make much of it; 8 bits change them by 3 to 13.
    """
    if layout is Layout.PANELS and choose_backend(16, 32, FLOAT32).layout is not Layout.PANELS:
        pytest.skip("no compiler")
    directory, plain = (build_checkpoint(tmp_path / name, variant) for name in ("given", "rounded"))
    chosen = VARIANTS[variant]
    drawn = random_tensors(chosen.config, chosen.seed)
    exact = {name: off_ties(name, tensor, variant) for name, tensor in drawn.items()}
    write_tensors(directory, exact)
    write_tensors(plain, {name: rounded(name, tensor, variant) for name, tensor in exact.items()})
    prompts = [np.random.default_rng(seed).integers(4, 144, 30).tolist() for seed in range(2)]

    in_8_bits = load_checkpoint(directory, WeightFormat(FLOAT32, layout, activations=FLOAT32))

    expected = compute_logprobs(load_checkpoint(plain), prompts)
    np.testing.assert_allclose(compute_logprobs(in_8_bits, prompts), expected, atol=1e-3)


def rounded(name, tensor, variant):
    """The numbers that a tensor's 8 bits and scales stand for."""
    scale = scales(name, tensor, variant)
    return tensor if scale is None else np.round(tensor / scale) * scale


def off_ties(name, tensor, variant):
    """The tensor without numbers so near to half a step that the rounding of a division chooses theirs."""
    scale = scales(name, tensor, variant)
    if scale is None:
        return tensor
    steps = tensor / scale
    is_tied = np.abs(steps - np.floor(steps) - np.float32(0.5)) < 1e-3
    return np.where(is_tied, tensor + np.float32(0.01) * scale, tensor)


def scales(name, tensor, variant):
    """A tensor's steps, by output; None for what is not rounded: vectors, convolutions, routers, decays, positions and
    what makes keys of latents."""
    exact = r"wpe|embed_positions|router|kv_b_proj|conv1d|conv\.conv|in_proj_(ba|a|b)\.|linear_attn\.[ab]_proj|\bgate\.|_gate\.|bias$"
    if tensor.ndim < 2 or re.search(exact, name.replace("per_layer_input_gate.", "")):
        return None
    axis = 1 if tensor.ndim == 3 and variant in ("gpt_oss", "llama4", "llama4_interleaved", "qwen3_vl_moe") else -1
    axis = 0 if variant == "gpt2" and re.search(r"\.c_\w+\.weight$", name) else axis
    return np.abs(tensor).max(axis=axis, keepdims=True) / np.float32(127)


@pytest.mark.parametrize(
    ("layout", "scans"),
    [
        pytest.param(Layout.MATRIX, True, marks=pytest.mark.thorough),
        pytest.param(Layout.AXES, False, marks=pytest.mark.thorough),
        pytest.param(Layout.AXES, True, marks=pytest.mark.thorough),
        pytest.param(Layout.MATRIX, False, marks=pytest.mark.thorough),
    ],
)
def test_several_devices_have_the_numbers_of_one(tmp_path, layout, scans):
    """Scales are those of whole outputs, also where an output's weights are split; each device has those of its own."""
    directory = build_checkpoint(tmp_path, "qwen3_sharded")

    alone, split = (load(directory, devices, quantized=True, layout=layout, scans=scans) for devices in (1, 2))

    for name, weight in alone.items():
        whole = (
            "qkv" not in name and "gate_up" not in name
        ) or layout is Layout.AXES  # else in the order of the devices
        order = (lambda x: x) if whole else (lambda x: np.sort(x, axis=None))
        padded = len(split[name]) > len(weight)  # the vocabulary
        np.testing.assert_array_equal(
            order(split[name][: len(weight)] if padded else split[name]), order(weight), err_msg=name
        )


@pytest.mark.parametrize("rows", [7, *(pytest.param(rows, marks=pytest.mark.thorough) for rows in (1, 40))])
@pytest.mark.parametrize("packed", [False, True])
def test_products_are_those_of_the_numbers_that_the_weights_stand_for(rows, packed):
    """With a bias, and of a table both its rows and its logits; by XLA and by the CPU's own kernel."""
    if packed and choose_backend(16, 32, FLOAT32).layout is not Layout.PANELS:
        pytest.skip("no compiler")
    rng = np.random.default_rng(rows)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((70, 3, 21), (rows, 70)))
    table, ids = rng.standard_normal((50, 70)).astype(np.float32), rng.integers(0, 50, rows)
    (numbers, scale), (rounded, row_scale) = quantize(jnp.asarray(weight), 0), quantize(jnp.asarray(table), 1)
    held = np.asarray(numbers) * np.asarray(scale), np.asarray(rounded) * np.asarray(row_scale)[:, None]
    form = WeightFormat(FLOAT32, Layout.PANELS if packed else Layout.AXES, activations=FLOAT32)
    axes = (("hidden", 70), ("group", 3), ("head_dim", 21))
    kernel_parameter = Parameter("kernel", Role.KERNEL, axes, tensors("kernel"), inputs=1)
    table_parameter = Parameter("table", Role.TABLE, (("vocabulary", 50), ("hidden", 70)), tensors("table"))
    kernel = nnx.Param(Scaled.made_of(jnp.asarray(weight), kernel_parameter, form, one_device()))
    embedding = Scaled.made_of(jnp.asarray(table), table_parameter, form, one_device())
    bias = nnx.Param(jnp.ones((3, 21)))

    product = jax.jit(linear)(jnp.asarray(x), kernel, bias, None)
    rows_of = jax.jit(look_up)(nnx.Param(embedding, declared=table_parameter), jnp.asarray(ids))

    np.testing.assert_allclose(product, np.einsum("tn,nko->tko", x, held[0]) + 1, atol=1e-4)
    np.testing.assert_allclose(rows_of, held[1][ids], atol=1e-6)
    np.testing.assert_allclose(jax.jit(Scaled.logits)(embedding, jnp.asarray(x)), x @ held[1].T, atol=1e-4)


@pytest.fixture(scope="module")
def surprise():
    """How surprised the shipped model is by each token of a story, through an engine of these settings."""
    ids = AutoTokenizer.from_pretrained(DEMO_MODEL)(STORY)["input_ids"]

    def ask(**settings):
        config = EngineConfig(
            max_num_seqs=1, max_num_batched_tokens=4, max_model_len=256, staged_readiness=True, **settings
        )
        engine = build_engine(config, lambda progress: None)
        engine.add(Sequence("", ids, SamplingParams(prompt_logprobs=0), frozenset(), 1, seed=0))
        told = [
            token
            for _ in iter(lambda: engine.has_work, False)
            for out in engine.step()
            for token in out.prompt_logprobs
        ]
        assert len(told) == len(ids) - 1
        return np.array([-token.logprobs[0] for token in told])

    return ask


@pytest.fixture(scope="module")
def exactly(surprise):
    """The same in float32."""
    return surprise()


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        pytest.param({"quantization": "int8", "kv_cache_dtype": "int8"}, 1.01, id="int8", marks=pytest.mark.thorough),
        pytest.param({"kv_cache_dtype": "fp8"}, 1.01, id="fp8 pages", marks=pytest.mark.thorough),
        pytest.param({"quantization": "w8a8"}, 1.01, id="w8a8", marks=pytest.mark.thorough),
        pytest.param(
            {"quantization": "w8a8", "tensor_parallel_size": 2},
            1.01,
            id="w8a8 on two devices",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_model_is_hardly_more_surprised_in_8_bits(surprise, exactly, settings, bound):
    """Perplexity of a fixed text, by prompt_logprobs, and no single token much less likely; yet not the same numbers."""
    rounded = surprise(**settings)

    perplexity, expected = (math.exp(nats.mean()) for nats in (rounded, exactly))
    assert expected < 2 and perplexity < bound * expected
    assert 0 < np.abs(rounded - exactly).max() < 0.5
