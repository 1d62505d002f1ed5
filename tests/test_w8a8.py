"""Products of int8 numbers: inputs quantised token by token, and for which checkpoints and modules that is so."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from loading import load
from whole_rows import compute_logprobs

from caching.tpu.tpu_chip import CHIPS
from engine.config import EngineConfig
from engine.devices.mesh import one_device
from engine.memory.number_formats import quantizations
from engine.models.linear import linear
from engine.models.model_config import read_config_file, read_model_config
from engine.models.partition import Partition, split
from engine.models.requirements import UnsupportedError
from engine.models.weights.factory import declared
from engine.models.weights.forms import Scaled
from engine.models.weights.parameters import Parameter, Role, tensors
from engine.models.weights.published.compressed_tensors import compressed_tensors, int8_inputs
from engine.models.weights.store import int8_products
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.planner.hlo_traffic import Moved
from engine.planner.roofline import Roofline
from engine.served_model import served_model
from engine.step.backend_choice import choose_backend

GOLDEN = Path(__file__).parent / "goldens" / "quantised" / "compressed_w8a8"
CONFIGS = Path(__file__).parent / "configs"
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)
AXES = (("hidden", 70), ("group", 3), ("head_dim", 21))
KERNEL = Parameter("kernel", Role.KERNEL, AXES, tensors("kernel"), inputs=1)
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
LAYOUTS = [
    Layout.AXES,
    *(pytest.param(layout, marks=pytest.mark.thorough) for layout in (Layout.MATRIX, Layout.PANELS)),
]


def form_in(layout, *names):
    """In 8 bits, with int8 products of these kernels."""
    if layout is Layout.PANELS and choose_backend(16, 32, FLOAT32).layout is not Layout.PANELS:
        pytest.skip("no compiler")
    return WeightFormat(FLOAT32, layout, activations=FLOAT32, int8_products=frozenset(names))


def build_kernel(layout):
    """A kernel with int8 products, and its numbers as they would be stored: i8[in, out] and f32[out]."""
    weight = np.random.default_rng(0).standard_normal((70, 63)).astype(np.float32)
    scales = np.abs(weight).max(axis=0) / np.float32(127)
    shaped = weight.reshape(70, 63) if layout is Layout.MATRIX else weight.reshape(70, 3, 21)
    kernel = nnx.Param(Scaled.made_of(jnp.asarray(shaped), KERNEL, form_in(layout, "kernel"), one_device()))
    return kernel, np.round(weight / scales).astype(np.int8), scales


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_is_that_of_integers_scaled_by_token_and_output(layout, rows):
    """As vLLM's int8 kernels have it: each row's largest magnitude is 127 steps, and sums are whole numbers."""
    kernel, numbers, scales = build_kernel(layout)
    x = np.random.default_rng(rows).standard_normal((rows, 70)).astype(np.float32) * np.float32(3)

    product = jax.jit(linear)(jnp.asarray(x), kernel, None, None)

    steps = np.abs(x).max(axis=1) / np.float32(127)
    sums = np.round(x / steps[:, None]).astype(np.int64) @ numbers.astype(np.int64)
    expected = sums * steps[:, None].astype(np.float64) * scales
    np.testing.assert_allclose(product, expected.reshape(rows, 3, 21), rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(product).reshape(rows, -1) - x @ (numbers * scales)).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_depend_on_each_other(layout):
    """Zeros of padding give zeros, and what is not a number stays in its row."""
    kernel, _, _ = build_kernel(layout)
    x = np.random.default_rng(1).standard_normal((5, 70)).astype(np.float32)
    x[1], x[2, 3], x[3, 5] = 0, np.nan, np.inf
    product = jax.jit(linear)

    found = np.asarray(product(jnp.asarray(x), kernel, None, None)).reshape(5, -1)

    assert (found[1] == 0).all() and np.isnan(found[2]).all() and not np.isfinite(found[3]).any()
    for row in (0, 4):
        alone = np.asarray(product(jnp.asarray(x[row : row + 1]), kernel, None, None)).reshape(-1)
        np.testing.assert_array_equal(alone, found[row])


def group(targets=("Linear",), inputs=INPUTS, weights=INT8):
    """A group of a quantization_config."""
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


def of_config(*groups, ignore=("lm_head",)):
    """The modules with int8 inputs by a quantization_config of these groups."""
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return int8_inputs(compressed_tensors({"config_groups": named, "ignore": ignore}))


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        {**INPUTS, "symmetric": False},
        {**INPUTS, "dynamic": False},
        {**INPUTS, "strategy": "tensor"},
        {**INPUTS, "type": "float"},
        {**INPUTS, "num_bits": 4},
        {"num_bits": 4, "type": "float", "dynamic": "local"},
    ],
)
def test_other_inputs_than_int8_by_token_stay_as_they_are(inputs):
    """Asymmetric, calibrated, by tensor, floats and of other bits."""
    assert of_config(group(inputs=inputs)) is None


def test_a_config_says_which_modules_inputs_are_quantised():
    """By name, by expression and by class, the most exact first; what is ignored is not, whatever the model is a part of."""
    plain = group(["re:.*mlp.*"], None)
    found = of_config(
        group(),
        plain,
        group(["model.layers.1.mlp.up_proj"]),
        ignore=["re:.*k_proj$", "model.language_model.layers.3.x"],
    )

    names = ["layers.0.q_proj", "layers.0.k_proj", "layers.1.mlp.up_proj", "layers.2.mlp.up_proj", "layers.3.x"]
    assert [found.has(f"model.{name}") for name in names] == [True, False, True, False, False]
    with pytest.raises(UnsupportedError, match=r"quantization_config has 're:\(', which is no expression"):
        of_config(group(), ignore=["re:("])


def test_a_checkpoint_is_served_as_it_was_made_for():
    """w8a8 unless the operator says otherwise; of other checkpoints only if the operator says so."""
    model, other = (read_model_config(GOLDEN.with_name(name)) for name in ("compressed_w8a8", "compressed_int8"))

    assert quantizations(EngineConfig(), model) == ("w8a8",)
    assert quantizations(EngineConfig(quantization="int8"), model) == ("int8",)
    assert quantizations(EngineConfig(), other) == ("int8",)
    assert "attention.qkv_kernel" in int8_products(Partition(other)) and int8_products(
        Partition(model)
    ) == int8_products(Partition(other))


@pytest.mark.thorough
def test_what_is_served_is_said():
    """Which uses of weights are not multiplied in int8."""
    served = served_model(EngineConfig(model=str(GOLDEN)))

    assert "weights in w8a8, tables in int8, read from compressed-tensors of int8" in served.describe()["dtype"]
    assert served.weight_format.int8_products == int8_products(served.partition)


@pytest.mark.thorough
def test_a_kernel_that_is_ignored_in_one_layer_keeps_its_inputs_in_all(tmp_path):
    """As layers of one stack are one array; a joined kernel if one of its parts is ignored."""
    config = json.loads((GOLDEN / "config.json").read_text())
    ignore = ["lm_head", "model.layers.1.mlp.down_proj", "re:.*v_proj"]
    config["quantization_config"]["ignore"] = ignore
    (tmp_path / "config.json").write_text(json.dumps(config))

    kept = int8_products(Partition(read_model_config(GOLDEN))) - int8_products(Partition(read_model_config(tmp_path)))

    assert kept == {"mlp.down_kernel", "attention.qkv_kernel"}


def paths(form):
    """For each golden case the log-probabilities of its tokens, and what they are in torch."""
    cases = json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]
    decoder, exact = load(GOLDEN, form), load(GOLDEN, WeightFormat(FLOAT32, form.layout))
    decoder.embedding, decoder.lm_head = exact.embedding, exact.lm_head  # tables have 8 bits
    computed = compute_logprobs(decoder, [case["prompt"] + case["tokens"] for case in cases])
    starts = [len(case["prompt"]) - 1 for case in cases]
    found = [
        logprobs[start : start + len(case["tokens"])][range(len(case["tokens"])), case["tokens"]]
        for logprobs, start, case in zip(computed, starts, cases, strict=True)
    ]
    return np.concatenate(found), np.concatenate([case["logprobs"] for case in cases])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_what_torch_makes_of_it_with_rounded_inputs(layout):
    """Its log-probabilities, up to inputs that fall on another step, as weights are rounded once more."""
    rounded, expected = paths(form_in(layout, *int8_products(Partition(read_model_config(GOLDEN)))))

    assert np.abs(rounded - expected).mean() < 0.015


@pytest.mark.thorough
def test_it_is_another_model_without_rounded_inputs():
    """So that the test above tells them apart."""
    plain, expected = paths(form_in(Layout.AXES))

    assert np.abs(plain - expected).mean() > 0.05


@pytest.mark.thorough
def test_kernels_alone_have_int8_products(tmp_path):
    """Not tables, experts, routers and what stays float32."""
    directory = build_checkpoint(tmp_path, "qwen2_moe")
    names = int8_products(Partition(read_model_config(directory)))

    decoder = load(directory, form_in(Layout.AXES, *names))

    state = nnx.to_flat_state(nnx.state(decoder))
    weights = {declared(variable): variable.get_value() for _, variable in state}
    multiplied = {one for one, weight in weights.items() if isinstance(weight, Scaled) and weight.int8_products}
    assert {one.name for one in multiplied} == names
    assert {one.role for one in multiplied} == {Role.KERNEL} and not any(one.exact for one in multiplied)
    assert {"attention.qkv_kernel", "attention.o_kernel", "mlp.shared.down_kernel"} < names


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_int8_products_are_counted_at_their_rate(kind):
    """Llama-3-8B: all kernels at twice the rate, the head and attention not; of a prompt's tokens as of decoding ones."""
    chip, model = CHIPS[kind], split(read_config_file(CONFIGS / "Llama-3-8B.json"), 4)
    form = WeightFormat(BFLOAT16, Layout.MATRIX, activations=BFLOAT16)
    plain, w8a8 = (
        Roofline(chip, model, each, BFLOAT16, 2_000_000_000)
        for each in (form, replace(form, int8_products=int8_products(model)))
    )

    saved = plain.step(64, 1000, Moved(), 0.0).compute_seconds - w8a8.step(64, 1000, Moved(), 0.0).compute_seconds

    kernels = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) // 4
    assert saved == pytest.approx(64 * 2 * kernels * (1 / chip.bf16_flops - 1 / chip.int8_ops))
    assert chip.int8_ops == 2 * chip.bf16_flops
    prompt = w8a8.prompt(512, 2000, Moved(10**9, 10**6), 0.001)
    logits = 2 * 128256 * 4096 // 4 / chip.bf16_flops
    decoding = w8a8.step(512, 1000, Moved(), 0.0).compute_seconds
    assert prompt.compute_seconds == pytest.approx(decoding - 511 * logits, rel=1e-3)
    assert prompt.tokens_per_second == pytest.approx(
        512 / (max(prompt.compute_seconds, prompt.bandwidth_seconds) + 0.001)
    )
    assert math.isclose(prompt.bandwidth_seconds, (10**9 + 10**6) / chip.hbm_bandwidth)
