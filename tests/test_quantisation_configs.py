"""What a quantization_config says beyond its method: of single modules, of zeros and order, in older words."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.requirements import UnsupportedError
from engine.models.weights.published.formats import published_format
from engine.models.weights.published.quantised_tensor import Format
from engine.models.weights.sources.tensor_source import Arrays

WHOLE = (slice(None), slice(None))
OUT, IN = 8, 64
Module = tuple[dict[str, NDArray[Any]], NDArray[np.float32]]
"""A module's tensors, and the weight f32[out, in] that they stand for."""


def read_format(method: str, **fields: Any) -> Format:
    """The Format of a quantization_config."""
    published = published_format({"quantization_config": {"quant_method": method, **fields}})
    assert published is not None
    return published


def weights_of(published: Format, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """What the tensors stand for, by the names of weights."""
    return {name: tensor.read(WHOLE) for name, tensor in published.tensors(Arrays(tensors)).items()}


def pack(numbers: NDArray[np.integer[Any]], bits: int, axis: int, order: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """Whole numbers packed into words along an axis, in ``order`` or the first one lowest."""
    moved = np.moveaxis(numbers, axis, -1).astype(np.uint64)
    shifts = np.array(order or range(32 // bits), np.uint64) * np.uint64(bits)
    words = (moved.reshape(*moved.shape[:-1], -1, 32 // bits) << shifts).sum(-1)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def drawn(seed: int, bits: int, group: int) -> tuple[NDArray[Any], NDArray[np.float16], NDArray[Any], NDArray[Any]]:
    """Numbers [in, out], scales and zeros [groups, out], and the weight of them [out, in]."""
    rng = np.random.default_rng(seed)
    numbers, zeros = rng.integers(2**bits, size=(IN, OUT)), rng.integers(2**bits, size=(IN // group, OUT))
    scales = (rng.random((IN // group, OUT)) + 0.5).astype(np.float16)
    weight = (numbers - zeros.repeat(group, 0)) * scales.astype(np.float32).repeat(group, 0)
    return numbers, scales, zeros, weight.T.astype(np.float32)


def gptq_module(name: str, bits: int, group: int, *, added: int = 1) -> Module:
    """As GPTQModel writes it: words along the inputs, and ``added`` taken from the words of zeros."""
    numbers, scales, zeros, weight = drawn(bits + group, bits, group)
    less = np.uint32(added * (2**32 - 1) // (2**bits - 1))
    tensors = {
        "qweight": pack(numbers, bits, 0),
        "qzeros": (pack(zeros, bits, 1).view(np.uint32) - less).view(np.int32),
        "scales": scales,
        "g_idx": np.arange(IN, dtype=np.int32) // group,
    }
    return {f"{name}.{part}": array for part, array in tensors.items()}, weight


def awq_module(name: str, group: int) -> Module:
    """As AutoAWQ writes it: words along the outputs, in its own order."""
    numbers, scales, zeros, weight = drawn(group, 4, group)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {"qweight": pack(numbers, 4, 1, order), "qzeros": pack(zeros, 4, 1, order), "scales": scales}
    return {f"{name}.{part}": array for part, array in tensors.items()}, weight


def compressed_module(name: str, bits: int, group: int) -> Module:
    """As llm-compressor packs symmetric numbers: words along the inputs of [out, in]."""
    numbers, scales, _, _ = drawn(bits + group, bits, group)
    middle = 2 ** (bits - 1)
    weight = (numbers.T - middle) * scales.astype(np.float32).T.repeat(group, 1)
    tensors = {
        "weight_packed": pack(numbers.T, bits, 1),
        "weight_scale": scales.T.copy(),
        "weight_shape": np.array([OUT, IN]),
    }
    return {f"{name}.{part}": array for part, array in tensors.items()}, weight.astype(np.float32)


Q, K, DOWN = (f"model.layers.{part}" for part in ("0.self_attn.q_proj", "0.self_attn.k_proj", "11.mlp.down_proj"))


@pytest.mark.parametrize("prefix", ["", "+:"])
def test_single_modules_of_gptq_have_bits_and_groups_of_their_own(prefix: str) -> None:
    """``dynamic``: the first expression that matches a name from its beginning counts; "-:" leaves a module plain."""
    published = read_format(
        "gptq",
        bits=4,
        group_size=64,
        dynamic={
            r"-:.*\.0\..*k_proj": {},
            prefix + r".*\.11\..*down_proj": {"bits": 8, "group_size": 16, "desc_act": True, "sym": False},
            prefix + r".*down_proj": {"bits": 4},
            "down_proj": {"bits": 8},  # matches nothing from its beginning
        },
    )
    modules = {Q: gptq_module(Q, 4, 64), DOWN: gptq_module(DOWN, 8, 16)}
    tensors = {name: array for stored, _ in modules.values() for name, array in stored.items()}

    read = weights_of(published, tensors | {f"{K}.weight": np.ones((OUT, IN), np.float16)})

    assert read.keys() == {f"{Q}.weight", f"{DOWN}.weight"}
    for name, (_, weight) in modules.items():
        np.testing.assert_allclose(read[f"{name}.weight"], weight, rtol=1e-6)


def test_expressions_may_mean_the_names_of_a_model_beside_others() -> None:
    """A model for images calls its text model's modules otherwise."""
    published = read_format(
        "gptq", bits=4, group_size=64, dynamic={r"model\.language_model\.layers\.11\.": {"bits": 8, "group_size": 32}}
    )
    stored, weight = gptq_module(DOWN, 8, 32)

    np.testing.assert_allclose(weights_of(published, stored)[f"{DOWN}.weight"], weight, rtol=1e-6)


def test_single_modules_of_awq_have_groups_of_their_own() -> None:
    """As GPTQModel writes AWQ, with all its names of the layout."""
    published = read_format(
        "awq", bits=4, group_size=64, format="gemm", version="gemm", dynamic={r".*down_proj": {"group_size": 16}}
    )
    modules = {Q: awq_module(Q, 64), DOWN: awq_module(DOWN, 16)}

    read = weights_of(published, {name: array for stored, _ in modules.values() for name, array in stored.items()})

    for name, (_, weight) in modules.items():
        np.testing.assert_allclose(read[f"{name}.weight"], weight, rtol=1e-6)


@pytest.mark.parametrize("fields", [{"format": "gptq_v2"}, {"format": "gptq", "checkpoint_format": "gptq_v2"}])
def test_the_layout_of_gptq_has_two_names(fields: dict[str, Any]) -> None:
    """GPTQModel calls it ``format`` as well, transformers ``checkpoint_format``, which counts where both are."""
    stored, weight = gptq_module(Q, 4, 32, added=0)

    read = weights_of(read_format("gptq", bits=4, group_size=32, **fields), stored)

    np.testing.assert_allclose(read[f"{Q}.weight"], weight, rtol=1e-6)


def test_blocks_may_be_written_as_text() -> None:
    """``128x128``, as older versions of compressed-tensors have it; targets and transforms may be none."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "4x48"}
    published = read_format(
        "compressed-tensors",
        config_groups={"group_0": {"targets": None, "weights": weights}},
        transform_config={"config_groups": {}},
    )
    rng = np.random.default_rng(0)
    numbers, scales = rng.standard_normal((OUT, IN)).astype(ml_dtypes.float8_e4m3fn), rng.random((2, 2), np.float32)

    read = weights_of(published, {f"{Q}.weight": numbers, f"{Q}.weight_scale": scales})

    each = scales.repeat(4, 0).repeat(48, 1)[:, :IN]
    np.testing.assert_array_equal(read[f"{Q}.weight"], numbers.astype(np.float32) * each)


def test_the_stored_shape_tells_packings_apart() -> None:
    """4 bits in groups of 32 and 8 bits in groups of 16 have words and scales of the same shapes."""
    groups = {
        f"group_{size}": {
            "targets": [target],
            "weights": {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size},
        }
        for bits, size, target in ((4, 32, "re:.*q_proj"), (8, 16, "re:.*down_proj"))
    }
    published = read_format("compressed-tensors", format="pack-quantized", config_groups=groups)
    modules = {Q: compressed_module(Q, 4, 32), DOWN: compressed_module(DOWN, 8, 16)}

    read = weights_of(published, {name: array for stored, _ in modules.values() for name, array in stored.items()})

    for name, (_, weight) in modules.items():
        np.testing.assert_allclose(read[f"{name}.weight"], weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "missing"), [({"symmetric": False}, "zero_point"), ({"actorder": "group"}, "g_idx")]
)
def test_zeros_and_order_that_the_config_has_are_not_left_out(fields: dict[str, Any], missing: str) -> None:
    """Without them the numbers would stand for other weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **fields}
    published = read_format(
        "compressed-tensors", config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}
    )

    with pytest.raises(ConfigurationError, match=f"q_proj.weight is quantised, but there is no .*{missing}: download"):
        weights_of(published, compressed_module(Q, 4, 32)[0])


def test_an_order_of_activations_has_its_groups() -> None:
    """``desc_act`` of GPTQ without ``g_idx`` would take inputs one after the other."""
    stored, _ = gptq_module(Q, 4, 32)
    del stored[f"{Q}.g_idx"]

    with pytest.raises(ConfigurationError, match=r"qweight is quantised, but there is no .*g_idx: download"):
        weights_of(read_format("gptq", bits=4, group_size=32, desc_act=True), stored)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("gptq", {"bits": 4, "dynamic": {".*q_proj": {"bits": 3}}}, "dynamic '.*q_proj': bits 3 is not supported"),
        ("gptq", {"bits": 4, "dynamic": {".*q_proj": {"group_size": 0.5}}}, "group_size"),
        ("gptq", {"bits": 4, "dynamic": {".*q_proj": {"group_size": -7}}}, "group_size -7 is not supported"),
        ("gptq", {"bits": 4, "dynamic": {".*q_proj": {"method": "awq"}}}, ": quant_method 'awq' is not supported"),
        ("gptq", {"bits": 4, "dynamic": {".*q_proj": {"format": "gptq_v2"}}}, ": format 'gptq_v2' is not supported"),
        ("gptq", {"bits": 4, "dynamic": {"-:(": {}}}, r"dynamic has '-:\(', which is no expression"),
        ("gptq", {"bits": 4, "format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("awq", {"bits": 4, "dynamic": {".*q_proj": {"bits": 8}}}, ": bits 8 is not supported; supported: 4"),
        ("awq", {"bits": 4, "format": "gemv"}, "version 'gemv' is not supported"),
        ("awq", {"bits": 4, "backend": "llm-awq"}, "llm-awq's layout"),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": {"block_structure": "128x"}}}},
            "block_structure '128x' is not like 128x128",
        ),
        (
            "compressed-tensors",
            {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config is not supported",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(method: str, fields: dict[str, Any], message: str) -> None:
    """Before a weight is read."""
    with pytest.raises((UnsupportedError, ValueError), match=message):
        read_format(method, **fields)
