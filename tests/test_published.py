"""Checkpoints that are quantised already, against what their own libraries and torch make of them.

``scripts/make_quantised_goldens`` writes the checkpoints and the goldens.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import LLAMA, build_checkpoint, random_tensors, write_tensors
from loading import FLOAT32
from numpy.typing import NDArray
from whole_rows import compute_logprobs

from caching.tpu.tpu_chip import CHIPS
from engine.build import planned
from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.models.decoder import Decoder
from engine.models.model_config import read_config_file, read_model_config
from engine.models.partition import split
from engine.models.weights import int4
from engine.models.weights.int4 import Int4Experts
from engine.models.weights.published import packed, quantised_tensor
from engine.models.weights.published.dequantised import Dequantised
from engine.models.weights.published.formats import published_format
from engine.models.weights.published.fp8 import fp8
from engine.models.weights.published.gptq import gptq
from engine.models.weights.published.mxfp4 import MXFP4
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import load_decoder, put
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.planner.chip_fit import ChipFit
from engine.served_model import served_model
from engine.step.backend_choice import choose_backend

GOLDENS = Path(__file__).parent / "goldens" / "quantised"
VARIANTS = sorted({path.stem for path in GOLDENS.glob("*.json")} - {"compressed_w8a8"})  # test_w8a8.py has that one
INT8 = WeightFormat(np.dtype(np.float32), activations=np.dtype(np.float32))
Q_PROJ = "model.layers.1.self_attn.q_proj"


def dequantised(directory: Path) -> Dequantised:
    """The checkpoint of a directory as plain tensors."""
    published = read_model_config(directory).published
    assert published is not None
    return Dequantised(open_checkpoint(directory), published)


def load(directory: Path, form: WeightFormat = FLOAT32, devices: int = 1) -> Decoder:
    """The decoder of a directory, equal in all but its weights to those of other formats: one compilation serves all."""
    partition = split(replace(read_model_config(directory), published=None), devices)
    mesh = DeviceMesh(tuple(jax.local_devices()[:devices]))
    return load_decoder(dequantised(directory), partition, form, mesh=mesh, progress=lambda done, total: None)


def paths_of(name: str, form: WeightFormat) -> list[tuple[NDArray[np.float32], dict[str, Any]]]:
    """For each golden case the log-probabilities f32[token, vocab] along its tokens."""
    cases = json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
    computed = compute_logprobs(load(GOLDENS / name, form), [case["prompt"] + case["tokens"] for case in cases])
    starts = [len(case["prompt"]) - 1 for case in cases]
    rows = zip(computed, starts, cases, strict=True)
    return [(logprobs[start : start + len(case["tokens"])], case) for logprobs, start, case in rows]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_quantised_checkpoint_is_what_its_own_library_makes_of_it(name: str) -> None:
    """Widened to float32 it takes the greedy path of the dequantised model in torch, within 1e-4."""
    for path, case in paths_of(name, FLOAT32):
        assert path.argmax(axis=-1).tolist() == case["tokens"]
        np.testing.assert_allclose(path.max(axis=-1), case["logprobs"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", [name if name == "awq" else pytest.param(name, marks=pytest.mark.thorough) for name in VARIANTS]
)
def test_in_8_bits_it_is_hardly_another_model(name: str) -> None:
    """As it is served by default its tokens are nearly as likely as in the dequantised model."""
    paths = paths_of(name, INT8)

    difference = np.concatenate([path[range(len(path)), case["tokens"]] - case["logprobs"] for path, case in paths])
    assert 0 < np.abs(difference).mean() < 0.15


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("compressed_int4", Layout.PANELS),
        *(
            pytest.param(name, layout, marks=pytest.mark.thorough)
            for name in ("compressed_int4", "gptq")
            for layout in (Layout.AXES, Layout.PANELS)
        ),
    ],
)
def test_experts_of_4_bits_are_served_as_they_are(monkeypatch: pytest.MonkeyPatch, name: str, layout: Layout) -> None:
    """In 4 bits with the groups of the checkpoint a mixture takes the greedy path of its dequantised twin in torch."""
    if layout is Layout.PANELS and choose_backend(16, 16, np.dtype(np.float32)).layout is not Layout.PANELS:
        pytest.skip("no compiler")
    monkeypatch.setattr(int4, "GROUP_SIZES", (32,))
    in_groups = replace(INT8, layout=layout, bits=4)
    cases = json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
    decoder, exact = load(GOLDENS / name, in_groups), load(GOLDENS / name, replace(FLOAT32, layout=layout))
    assert isinstance(decoder.layers[0].mlp.down_kernel.get_value(), Int4Experts)
    decoder.embedding, decoder.lm_head = exact.embedding, exact.lm_head  # tables have 8 bits

    computed = compute_logprobs(decoder, [case["prompt"] + case["tokens"] for case in cases])

    for logprobs, case in zip(computed, cases, strict=True):
        path = logprobs[len(case["prompt"]) - 1 :][: len(case["tokens"])]
        assert path.argmax(axis=-1).tolist() == case["tokens"]
        np.testing.assert_allclose(path.max(axis=-1), case["logprobs"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_a_tensor_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rows and columns, wherever blocks, groups and words begin, in chunks of any size."""
    source = dequantised(GOLDENS / name)
    rng = np.random.default_rng(0)
    for tensor in source.names:
        shape = source.info(tensor).shape
        whole = source.read(tensor, (slice(None),) * len(shape))
        assert whole.shape == shape
        starts = [int(rng.integers(size)) for size in shape]
        index = tuple(
            slice(start, int(rng.integers(start, size)) + 1) for start, size in zip(starts, shape, strict=True)
        )
        monkeypatch.setattr(quantised_tensor, "ROWS_AT_ONCE", int(rng.integers(1, 300)))
        np.testing.assert_array_equal(source.read(tensor, index), whole[index])


def test_several_devices_read_the_same_weights() -> None:
    """Split by heads and columns, the parts put together are the weights of one device."""
    one, two = (load(GOLDENS / "awq", devices=devices).layers[0].mlp.down_kernel.get_value() for devices in (1, 2))

    np.testing.assert_array_equal(np.asarray(one.values), np.asarray(two.values))


def test_real_blocks_are_ragged_at_the_end() -> None:
    """Blocks of 128 x 128, as published, over a weight that is no multiple of them."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((300, 200)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 2)).astype(np.float32)
    source = Dequantised(Arrays({"a.weight": numbers, "a.weight_scale_inv": scales}), fp8({}))

    each = scales.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    np.testing.assert_array_equal(source.read("a.weight", (slice(None),) * 2), numbers.astype(np.float32) * each)


def test_experts_in_one_tensor_have_scales_of_their_own() -> None:
    """Stacked experts of FP8: a scale for each of them, or for each of their rows."""
    numbers = np.ones((3, 4, 6), ml_dtypes.float8_e4m3fn)
    by_expert, by_row = np.arange(1, 4, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4, 1)
    tensors = {"a": numbers, "a_scale": by_expert, "b": numbers, "b_scale_inv": by_row}
    source = Dequantised(Arrays(tensors), fp8({"weight_block_size": None}))

    whole = (slice(None),) * 3
    np.testing.assert_array_equal(source.read("a", whole), np.broadcast_to(by_expert[:, None, None], (3, 4, 6)))
    np.testing.assert_array_equal(source.read("b", whole), np.broadcast_to(by_row, (3, 4, 6)))


def test_mxfp4_is_its_published_layout() -> None:
    """Two numbers of e2m1 in a byte, the lower half first, times a power of two for each 32; any part of a tensor."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 3, 16), np.uint8), rng.integers(120, 135, (2, 6, 3), np.uint8)
    tensors = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales}
    source = Dequantised(Arrays(tensors), MXFP4())

    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(2, 6, 3, 32)
    values = np.where(halves & 8, -1, 1) * table[halves & 7] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    whole = values.reshape(2, 6, 96).transpose(0, 2, 1)
    assert list(source.names) == ["experts.gate_up_proj"] and source.info("experts.gate_up_proj").shape == (2, 96, 6)
    for index in [(slice(None),) * 3, (slice(1, 2), slice(40, 71), slice(2, 5))]:
        np.testing.assert_array_equal(source.read("experts.gate_up_proj", index), whole[index])


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_from_their_lowest_bits(bits: int) -> None:
    """A word's numbers in order, the sign of the word notwithstanding."""
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, 64))
    shifts = np.arange(32 // bits) * bits
    words = (numbers.reshape(3, -1, 32 // bits).astype(np.uint64) << shifts.astype(np.uint64)).sum(-1)

    np.testing.assert_array_equal(packed.unpack(words.astype(np.uint32).view(np.int32), bits), numbers)


@pytest.mark.parametrize(
    ("asked", "dtype", "words"),
    [(None, "int8", "weights in int8, read from AWQ in groups of 32"), ("none", "float32", "read from AWQ")],
)
def test_the_form_that_is_served_is_said(asked: str | None, dtype: str, words: str) -> None:
    """int8 unless the operator wants the numbers widened, and the status says which."""
    served = served_model(EngineConfig(model=str(GOLDENS / "awq"), quantization=asked, dtype="float32"))

    assert words in served.describe()["dtype"]
    decoder = served.abstract()
    served.load(decoder, lambda done, total: None)
    assert decoder.layers[0].mlp.down_kernel.get_value().values.dtype == dtype


def rewrite(directory: Path, name: str, **changes: NDArray[Any] | None) -> Path:
    """A copy of a golden checkpoint with some tensors changed or (None) gone."""
    shutil.copytree(GOLDENS / name, directory, dirs_exist_ok=True)
    checkpoint = open_checkpoint(directory)
    tensors = {
        tensor: checkpoint.read(tensor, (slice(None),) * len(checkpoint.info(tensor).shape))
        for tensor in checkpoint.names
    }
    write_any(directory / "model.safetensors", {k: v for k, v in {**tensors, **changes}.items() if v is not None})
    return directory


def write_any(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """A safetensors file with dtypes that its library does not take from numpy."""
    names = {dtype: name for name, dtype in stored_dtypes().items()}
    header, data = {}, b""
    for tensor, array in tensors.items():
        content = array.tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[tensor] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def stored_dtypes() -> dict[str, Any]:
    """The dtypes of the format."""
    from engine.models.weights.sources.safetensors_header import DTYPES

    return DTYPES


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "fp8_tensor",
            {f"{Q_PROJ}.weight_scale": None},
            r"q_proj\.weight is quantised, but there is no .*weight_scale",
        ),
        (
            "fp8_channel",
            {f"{Q_PROJ}.weight_scale": np.ones(63, np.float32)},
            r"q_proj\.weight_scale has shape \[63\], which are scales neither of all of .* \[64, 64\] nor of its rows",
        ),
        (
            "fp8_channel",
            {f"{Q_PROJ}.weight_scale": np.ones(64, np.int8)},
            r"weight_scale is stored as I8; scales are F32",
        ),
        (
            "fp8_blocks",
            {f"{Q_PROJ}.weight_scale_inv": np.full((2, 2), np.nan, np.float32)},
            r"q_proj\.weight_scale_inv has scales that are not finite",
        ),
        ("awq", {f"{Q_PROJ}.qzeros": None}, r"q_proj\.qweight is quantised, but there is no .*q_proj\.qzeros"),
        ("awq", {f"{Q_PROJ}.scales": np.ones((3, 64), np.float16)}, r"scales is F16 \[3, 64\], but .* \[2, 64\]"),
        ("awq", {f"{Q_PROJ}.scales": np.full((2, 64), np.inf, np.float16)}, r"q_proj\.scales has scales that are not"),
        ("awq", {f"{Q_PROJ}.qweight": np.ones(9, np.int32)}, r"qweight has shape \[9\], where packed weights have two"),
        ("gptq_order", {f"{Q_PROJ}.g_idx": np.full(64, 2, np.int32)}, r"g_idx has groups 2 to 2, but there are 2"),
        (
            "gptq_order",
            {f"{Q_PROJ}.qweight": np.ones((4, 64), np.int32)},
            r"q_proj\.\w+ is \w+ \[\d+.*\], but for 4 bits",
        ),
        ("compressed_int4", {f"{Q_PROJ}.weight_scale": np.ones((64, 3), np.float32)}, r"weight_scale is F32 \[64, 3\]"),
        (
            "compressed_int8_zeros",
            {f"{Q_PROJ}.weight_zero_point": np.ones((64, 2), np.int8)},
            r"weight_zero_point is not I8 \[64, 1\]",
        ),
        ("awq", {"model.layers.0.mlp.up_proj.qzeros2": np.ones(2, np.int32)}, r"qzeros2 is in the checkpoint, but"),
        (
            "awq",
            {f"{Q_PROJ}.weight": np.ones((64, 64), np.float32)},
            r"q_proj\.weight is there as it is, and quantised as .*q_proj\.qweight: leave one",
        ),
        (
            "mxfp4",
            {"model.layers.0.mlp.experts.down_proj": np.ones(1, np.float32)},
            r"down_proj is there as it is, and quantised as .*down_proj_blocks",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, NDArray[Any] | None], message: str
) -> None:
    """Scales that are missing, misshapen or no numbers, and words that do not fit, with the tensor's name."""
    directory = rewrite(tmp_path, name, **changes)

    with pytest.raises(ConfigurationError, match=message):
        load(directory)


def test_biases_of_zeros_are_no_other_model(tmp_path: Path) -> None:
    """AutoGPTQ has written them beside all kernels of models without biases; one that adds something is refused."""
    zeros = {
        f"{Q_PROJ}.bias": np.zeros(64, np.float16),
        "model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float16),
        "model.layers.0.self_attn.k_proj.bias": np.zeros((), np.float16),
    }

    load(rewrite(tmp_path, "gptq", **zeros))

    with pytest.raises(ConfigurationError, match=r"q_proj\.bias is in the checkpoint, but"):
        load(rewrite(tmp_path, "gptq", **{f"{Q_PROJ}.bias": np.full(64, 0.1, np.float16)}))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_zeros_of_gptq_are_what_its_layout_says(bits: int, layout: str) -> None:
    """Those of 0 too, for which the first layout's words, less one in each number, have borrowed."""
    outputs, inputs, per, zeros = 8, 32, 32 // bits, np.array([0, 7, 8, 0, 5, 9, 10, 0], np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(zeros.reshape(1, -1, per) << shifts, axis=-1)
    less_one = np.uint32({4: 0x11111111, 8: 0x01010101}[bits])  # convert_gptq_v2_to_v1_format
    numbers = np.random.default_rng(0).integers(2**bits, size=(inputs // per, per, outputs), dtype=np.uint32)
    tensors = {
        "m.qweight": np.bitwise_or.reduce(numbers << shifts[:, None], axis=1).view(np.int32),
        "m.qzeros": (words - less_one if layout == "gptq" else words).view(np.int32),
        "m.scales": np.ones((1, outputs), np.float16),
    }
    config = {"bits": bits, "group_size": inputs, "checkpoint_format": layout}

    read = gptq(config).tensors(Arrays(tensors))["m.weight"].read((slice(None), slice(None)))

    np.testing.assert_array_equal(read, numbers.reshape(inputs, outputs).T - zeros[:, None].astype(np.float32))


@pytest.mark.parametrize("name", ["k_proj.k_scale", "kv_scale", "attn.v_scale", "v_proj.output_scale"])
def test_scales_of_pages_are_not_read(tmp_path: Path, name: str) -> None:
    """By all the names that publishers have for them."""
    load(rewrite(tmp_path, "fp8_tensor", **{f"model.layers.0.self_attn.{name}": np.ones((), np.float32)}))


@pytest.mark.parametrize(
    ("method", "nulls"),
    [("gptq", ("checkpoint_format", "is_marlin_format", "group_size")), ("awq", ("version", "group_size", "w_bit"))],
)
def test_a_null_of_a_format_is_as_good_as_no_key(method: str, nulls: tuple[str, ...]) -> None:
    """As GPTQModel and AutoAWQ may write what was not chosen."""
    given = {"quant_method": method, "bits": 4}

    read = published_format({"quantization_config": given | dict.fromkeys(nulls)})

    assert read == published_format({"quantization_config": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": ["awq"]}, "which is not read"),
        ({"quant_method": "awq", "bits": 4, "group_size": 10**30}, "group_size"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes', which is not read; .* give the model that it was",
        ),
        ({"quant_method": "exl2"}, "quant_method 'exl2', which is not read"),
        ({"load_in_8bit": True}, "quant_method 'None', which is not read"),
        ("awq", "quantization_config 'awq' is not an object"),
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "AWQ without zero_point"),
        ({"quant_method": "gptq", "bits": 2}, "bits 2 is not supported; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is"),
        ({"quant_method": "compressed-tensors"}, "config_groups have no weights"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {}}, "kv_cache_scheme": {"num_bits": 8}},
            "config_groups have no weights",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "4 bits of type float; supported are int4, int8, FP8",
        ),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    ],
)
def test_formats_that_are_not_read_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    """With what to do instead, before anything is read."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": given}))

    with pytest.raises(ConfigurationError, match=message):
        read_model_config(tmp_path)


def test_weights_beside_scales_of_pages_alone_are_served_as_they_are(tmp_path: Path) -> None:
    """A ``kv_cache_scheme`` quantises no weights: the scales are not used, and the weights are in no 8 bits."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    given = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    build_checkpoint(tmp_path, quantization_config=given)
    tensors = random_tensors(json.loads((tmp_path / "config.json").read_text()), 5)
    scales = {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
    write_tensors(tmp_path, tensors | scales)

    decoder = load(tmp_path)

    down = decoder.layers[1].mlp.down_kernel.get_value().values
    np.testing.assert_array_equal(np.asarray(down).T, tensors["model.layers.1.mlp.down_proj.weight"])
    served = served_model(EngineConfig(model=str(tmp_path)))
    assert served.quantization is None and served.smaller is None
    assert "read from compressed-tensors of keys and values alone" in served.describe()["dtype"]


def test_plain_weights_may_replace_quantised_ones() -> None:
    """A source of plain tensors is put into the decoder of a quantised checkpoint: nothing in it is quantised."""
    directory = GOLDENS / "awq"
    config = json.loads((directory / "config.json").read_text())
    mesh = DeviceMesh(tuple(jax.local_devices()[:1]))
    partition = split(read_model_config(directory), 1)
    decoder = load_decoder(open_checkpoint(directory), partition, FLOAT32, mesh=mesh, progress=lambda done, total: None)
    tensors = random_tensors(config, 5)

    put(Arrays(tensors), decoder, FLOAT32, mesh=mesh, progress=lambda done, total: None)

    down = decoder.layers[1].mlp.down_kernel.get_value().values
    np.testing.assert_array_equal(np.asarray(down).T, tensors["model.layers.1.mlp.down_proj.weight"])


def test_an_older_key_names_the_format_too(tmp_path: Path) -> None:
    """``compression_config`` was the name before ``quantization_config``."""
    config = json.loads((GOLDENS / "compressed_int8" / "config.json").read_text())
    given = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps({**config, "compression_config": given}))

    published = read_model_config(tmp_path).published

    assert published is not None and re.fullmatch("compressed-tensors of int8", published.description)


def test_scales_of_fbgemm_are_not_said_to_be_of_blocks() -> None:
    """They are of outputs; 128 x 128 is the default of the other FP8 alone."""
    for name, description in (("fp8_channel", "FP8"), ("fp8_blocks", "FP8 in blocks of 48 x 40")):
        published = read_model_config(GOLDENS / name).published
        assert published is not None and published.description == description


def test_4_bits_are_served_in_4_where_8_do_not_fit() -> None:
    """By a daemon's arithmetic, unless the operator has chosen; the status says what is served."""
    served = served_model(EngineConfig(model=str(GOLDENS / "awq"), dtype="float32", max_num_seqs=1))
    enough = 2 * served.footprint.weight_bytes + 2**26
    ample, _ = planned(served, enough)
    short, fits = 0, enough  # the most bytes that are too few for 8 bits
    while fits - short > 1:
        middle = (short + fits) // 2
        short, fits = (short, middle) if planned(served, middle)[0] is served else (middle, fits)
    small, planner = planned(served, short)

    assert ample is served and small.footprint.weight_bytes < served.footprint.weight_bytes
    assert "weights in int4, tables in int8, read from AWQ" in small.describe()["dtype"] and planner.pool.num_pages > 1
    asked = replace(served, config=replace(served.config, quantization="int8"))
    with pytest.raises(ConfigurationError):
        _ = planned(asked, short)[1].max_model_len


@pytest.mark.parametrize(("chips", "form"), [(4, "int4"), (8, "int8")])
def test_a_plan_serves_4_bits_in_4_where_8_do_not_fit(tmp_path: Path, chips: int, form: str) -> None:
    """Llama-3-70B in AWQ on v5e chips, by arithmetic."""
    config = json.loads((Path(__file__).parent / "configs" / "Llama-3-70B.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq", "bits": 4}}))
    partition = split(read_config_file(path), chips)

    fit = ChipFit(EngineConfig(max_model_len=4096), partition, CHIPS["TPU v5 lite"], np.dtype(ml_dtypes.bfloat16))

    fit.check(chips)
    assert fit.quantization == form
