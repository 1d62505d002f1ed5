"""From safetensors to the decoder's parameters: values, dtypes, shards, and every way a checkpoint can be wrong."""

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from flax import nnx
from loading import FLOAT32, load
from numpy.typing import NDArray

from engine.devices.mesh import one_device
from engine.errors import ConfigurationError
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.weights import store, tensor_check
from engine.models.weights.placement import device_parts
from engine.models.weights.sources.checkpoint import Checkpoint, open_checkpoint, stored_names
from engine.models.weights.sources.opening import check_weights
from engine.models.weights.sources.tensor_source import Arrays
from engine.models.weights.store import parameter_bytes, put
from engine.models.weights.weight_format import Layout, WeightFormat

BFLOAT16 = WeightFormat(jnp.dtype(jnp.bfloat16))
EMBEDDING, Q_PROJ = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"


def parameters_of(decoder: Decoder) -> dict[str, jax.Array]:
    """Its parameters by name."""
    return {
        ".".join(map(str, path)): jax.tree.leaves(leaf.get_value())[0]
        for path, leaf in nnx.to_flat_state(nnx.state(decoder))
    }


def tensors_of(variant: str = "llama2") -> dict[str, NDArray[np.float32]]:
    """The tensors that build_checkpoint writes."""
    return random_tensors(VARIANTS[variant].config, VARIANTS[variant].seed)


def assert_same(one: Decoder, other: Decoder) -> None:
    """Both have the same parameters, bit for bit."""
    ours, theirs = parameters_of(one), parameters_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[name]), err_msg=name)


def test_q_k_and_v_are_fused_by_kv_head(tmp_path: Path) -> None:
    """A fused kernel holds, for each kv head, its query heads and then its key and its value, transposed."""
    directory, tensors = build_checkpoint(tmp_path, "qwen2"), tensors_of("qwen2")

    attention = load(directory).layers[1].mixer

    prefix = "model.layers.1.self_attn"
    kernel, bias = np.asarray(attention.qkv_kernel.get_value().values), np.asarray(attention.qkv_bias[...])
    for kv_head in range(2):
        for column, (name, head) in enumerate(
            [("q", 2 * kv_head), ("q", 2 * kv_head + 1), ("k", kv_head), ("v", kv_head)]
        ):
            rows = slice(12 * head, 12 * head + 12)
            np.testing.assert_array_equal(kernel[:, kv_head, column].T, tensors[f"{prefix}.{name}_proj.weight"][rows])
            np.testing.assert_array_equal(bias[kv_head, column], tensors[f"{prefix}.{name}_proj.bias"][rows])


def test_gate_and_up_are_fused_side_by_side(tmp_path: Path) -> None:
    """The fused kernel of the feed-forward holds the gate at 0 and up at 1, transposed."""
    directory, tensors = build_checkpoint(tmp_path, "llama_linear"), tensors_of("llama_linear")

    mlp = load(directory).layers[0].mlp

    for column, name in enumerate(["gate", "up"]):
        weight, bias = (tensors[f"model.layers.0.mlp.{name}_proj.{kind}"] for kind in ("weight", "bias"))
        np.testing.assert_array_equal(np.asarray(mlp.gate_up_kernel.get_value().values)[:, column].T, weight)
        np.testing.assert_array_equal(np.asarray(mlp.gate_up_bias[...])[column], bias)


ONE_OF_EACH_FORM = {"llama2", "llama2_bfloat16", "qwen3_sharded", "gemma3_vision", "mixtral", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in ONE_OF_EACH_FORM else pytest.mark.thorough) for name in VARIANTS],
)
def test_shards_hold_the_same_model(tmp_path: Path, variant: str) -> None:
    """A checkpoint in three files and an index loads as it does from one file."""
    single = build_checkpoint(tmp_path / "single", variant, files=1)
    sharded = build_checkpoint(tmp_path / "sharded", variant, files=3)

    assert_same(load(single), load(sharded))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_dtype_asked_for(tmp_path: Path, stored: str, dtype: str) -> None:
    """Whatever the checkpoint's dtype, parameters get the one asked for by rounding once; norm scales stay float32."""
    directory = build_checkpoint(tmp_path, "qwen3", stored=stored)
    kept = {"float32": np.float32, "float16": np.float16, "bfloat16": jnp.bfloat16}[stored]
    weight = tensors_of("qwen3")["model.layers.0.self_attn.o_proj.weight"]
    if stored == "bfloat16":
        weight = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)

    parameters = parameters_of(load(directory, WeightFormat(jnp.dtype(dtype))))

    for name, value in parameters.items():
        assert value.dtype == ("float32" if name.endswith("scale") else dtype), name
    expected = weight.astype(kept).astype(jnp.dtype(dtype)).T
    np.testing.assert_array_equal(np.asarray(parameters["layers.0.mixer.o_kernel"]), expected)


@pytest.mark.parametrize("variant", ["llama3", "llama_linear"])
def test_progress_counts_every_byte(tmp_path: Path, variant: str) -> None:
    """Progress rises with each parameter to exactly the bytes that were foretold, which are those on the device."""
    directory = build_checkpoint(tmp_path, variant)
    heard: list[tuple[int, int]] = []

    parameters = parameters_of(load(directory, BFLOAT16, progress=lambda done, total: heard.append((done, total))))

    foretold = parameter_bytes(Partition(read_model_config(directory)), BFLOAT16)
    assert foretold == sum(value.nbytes for value in parameters.values())
    assert [total for _, total in heard] == [foretold] * len(parameters)
    assert [done for done, _ in heard] == np.cumsum([value.nbytes for value in parameters.values()]).tolist()


def test_the_host_reads_one_parameter_ahead_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once, while the one before is placed at the earliest."""
    directory, placed, ahead = build_checkpoint(tmp_path), [0], []

    def counted(*arguments: Any) -> Any:
        ahead.append(len(ahead) + 1 - len(placed))
        return device_parts(*arguments)

    monkeypatch.setattr(store, "device_parts", counted)
    decoder = load(directory, progress=lambda done, total: placed.append(done))

    assert len(ahead) == len(placed) - 1 == len(parameters_of(decoder))
    assert max(ahead) == 1


def test_an_error_of_a_read_is_that_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread reads, which ends with it."""

    def damaged(*_: Any) -> Any:
        raise ConfigurationError("the disk is gone")

    monkeypatch.setattr(store, "device_parts", damaged)
    with pytest.raises(ConfigurationError, match="the disk is gone"):
        load(build_checkpoint(tmp_path))

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read weights")]


def test_each_device_reads_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split by heads, width and vocabulary, loading reads every element of those tensors once."""
    directory = build_checkpoint(tmp_path, "llama2", vocab_size=256)
    read: dict[str, int] = {}

    def count(checkpoint: Checkpoint, name: str, index: Any, plain: Any = Checkpoint.read) -> Any:
        part = plain(checkpoint, name, index)
        read[name] = read.get(name, 0) + part.size
        return part

    monkeypatch.setattr(Checkpoint, "read", count)
    load(directory, devices=2)

    checkpoint = open_checkpoint(directory)
    for name in checkpoint.names:
        parts = 2 if name.endswith("norm.weight") else 1  # which both have
        assert read[name] == parts * np.prod(checkpoint.info(name).shape)


def rewrite(directory: Path, variant: str = "llama2", **changes: NDArray[np.float32] | None) -> Path:
    """A checkpoint in which some tensors are others, new, or (None) gone."""
    build_checkpoint(directory, variant)
    tensors = {**tensors_of(variant), **changes}
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    return directory


@pytest.mark.parametrize("name", [Q_PROJ, EMBEDDING, "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """A tensor that config.json calls for and the checkpoint lacks is refused by name."""
    directory = rewrite(tmp_path, **{name: None})

    with pytest.raises(ConfigurationError, match=f"{re.escape(name)} is not in the checkpoint"):
        load(directory)


def test_several_missing_tensors_are_counted(tmp_path: Path) -> None:
    """Of many missing tensors the first is named and the others are counted."""
    directory = build_checkpoint(tmp_path, "llama2")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))

    with pytest.raises(ConfigurationError, match=r"model\.layers\.3\.\S+ \(and 8 more such\) is not in"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [(Q_PROJ, (48, 24), (48, 48)), (EMBEDDING, (143, 48), (144, 48)), ("model.norm.weight", (1, 48), (48,))],
)
def test_a_misshapen_tensor_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """A tensor of another shape than config.json calls for is refused, with both shapes."""
    directory = rewrite(tmp_path, **{name: np.zeros(shape, np.float32)})
    message = f"{name} has shape {list(shape)}, but config.json calls for {list(expected)}"

    with pytest.raises(ConfigurationError, match=re.escape(message)):
        load(directory)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "score.weight", "model.layers.7.mlp.gate"])
def test_an_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    """A tensor that nothing uses means that this is another model than config.json says: refused by name."""
    directory = rewrite(tmp_path, **{name: np.ones(48, np.float32)})

    with pytest.raises(ConfigurationError, match=f"{re.escape(name)} is in the checkpoint, but"):
        load(directory)


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    """As a text model's alone, and as that beside a vision tower: neither is left out silently."""
    beside, name = build_checkpoint(tmp_path, "mistral_vision"), "model.norm.weight"
    tensors = random_tensors(VARIANTS["mistral_vision"].config, 0)
    write_tensors(beside, {**tensors, name: np.zeros(1, np.float32)})

    with pytest.raises(ConfigurationError, match=rf"{name} and .*norm\.weight|norm\.weight and {name} are the same"):
        load(beside)


def test_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    """The rotary frequencies that old checkpoints hold follow from config.json and are not missed."""
    plain = build_checkpoint(tmp_path / "plain")
    old = rewrite(tmp_path / "old", **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)})

    assert_same(load(plain), load(old))


@pytest.mark.parametrize("block", [4096, 50])
def test_a_head_equal_to_its_embedding_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """A tied checkpoint may hold the head that its embedding is, compared in blocks of any size."""
    monkeypatch.setattr(tensor_check, "COMPARED_ROWS", block)
    tied = build_checkpoint(tmp_path / "tied", "qwen2")
    doubled = rewrite(tmp_path / "doubled", "qwen2", **{"lm_head.weight": tensors_of("qwen2")[EMBEDDING]})

    assert_same(load(tied), load(doubled))


def test_a_text_model_beside_other_parts_has_the_head_that_is_stored(tmp_path: Path) -> None:
    """Also where config.json ties it, as transformers 5 writes of each Mistral 3, which it serves with both."""
    untied = build_checkpoint(tmp_path / "untied", "mistral_vision")
    shutil.copytree(untied, tmp_path / "again")
    config = json.loads((untied / "config.json").read_text())
    (tmp_path / "again" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    assert_same(load(untied), load(tmp_path / "again"))


def test_experts_of_qwen3_vl_may_be_stored_either_way_round(tmp_path: Path) -> None:
    """As they are published, and as transformers 5 saves them under the same names."""
    published = build_checkpoint(tmp_path / "published", "qwen3_vl_moe")
    saved = shutil.copytree(published, tmp_path / "saved")
    tensors = tensors_of("qwen3_vl_moe")
    turned = {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in tensors if ".experts." in name}
    write_tensors(saved, tensors | turned)

    assert_same(load(published), load(saved))
    write_tensors(saved, tensors | {name: tensor[:, :-1] for name, tensor in turned.items()})
    with pytest.raises(ConfigurationError, match=r"experts\.\w+_proj has shape"):
        load(saved)


def test_olmo_hybrid_may_have_the_names_of_transformers_modules(tmp_path: Path) -> None:
    """As it saves them if told so; by default it cuts the convolution in thirds, which is refused by shape."""
    published = build_checkpoint(tmp_path / "published", "olmo_hybrid")
    saved, tensors = shutil.copytree(published, tmp_path / "saved"), tensors_of("olmo_hybrid")
    norms = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    own = {re.sub("|".join(norms), lambda found: norms[found[0]], name): tensors[name] for name in tensors}
    for layer in range(2):
        parts = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = np.concatenate([own.pop(name) for name in parts])
        own[f"model.layers.{layer}.linear_attn.conv1d.weight"] = whole
        tensors |= dict(zip(parts, np.split(whole, 3), strict=True))
    write_tensors(saved, own)

    assert_same(load(published), load(saved))
    write_tensors(saved, tensors)
    with pytest.raises(ConfigurationError, match=r"[qkv]_conv1d\.weight has shape"):
        load(saved)


def test_gates_of_lfm3_may_have_the_name_of_transformers_module(tmp_path: Path) -> None:
    """By default it saves them under the published one."""
    published = build_checkpoint(tmp_path / "published", "lfm3")
    saved, tensors = shutil.copytree(published, tmp_path / "saved"), tensors_of("lfm3")
    own = {name.replace("self_attn.gate_proj", "self_attn.g_proj"): tensor for name, tensor in tensors.items()}
    assert own.keys() != tensors.keys()
    write_tensors(saved, own)

    assert_same(load(published), load(saved))


@pytest.mark.parametrize("variant", ["gpt2", "opt"])
def test_a_checkpoint_of_a_base_model_alone_is_read_as_one_with_a_head(tmp_path: Path, variant: str) -> None:
    """Its names have no prefix; a head equal to the embedding is passed over, and names of both kinds are refused."""
    tensors, prefix = tensors_of(variant), {"gpt2": "transformer.", "opt": "model."}[variant]
    base = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    whole = {f"{prefix}{name}": tensor for name, tensor in base.items()}
    (table,) = (name for name in base if name.endswith(("wte.weight", "embed_tokens.weight")))
    plain, other = build_checkpoint(tmp_path / "plain", variant), build_checkpoint(tmp_path / "other", variant)

    for same in (base, whole, base | {"lm_head.weight": base[table]}, whole | {"lm_head.weight": base[table]}):
        write_tensors(other, same)
        assert_same(load(plain), load(other))

    write_tensors(other, whole | {table: base[table]})
    with pytest.raises(ConfigurationError, match=f"{re.escape(table)} is in the checkpoint, but"):
        load(other)


@pytest.mark.parametrize(("rows", "block"), [(144, 4096), (144, 50), (100, 4096)])
def test_a_head_unlike_its_embedding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    """A tied checkpoint with a head of its own contradicts itself: the message says which key decides."""
    monkeypatch.setattr(tensor_check, "COMPARED_ROWS", block)
    head = tensors_of("qwen2")[EMBEDDING][:rows].copy()
    head[-1, -1] += 1
    directory = rewrite(tmp_path, "qwen2", **{"lm_head.weight": head})

    with pytest.raises(ConfigurationError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
        load(directory)


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor stored as integers is refused by name, with the dtypes that are read."""
    directory = build_checkpoint(tmp_path, stored="int8")

    with pytest.raises(ConfigurationError, match=r"\S+\.weight is stored as I8; supported are F32, F16, BF16"):
        load(directory)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A shard that was not downloaded is named before anything is loaded."""
    directory = build_checkpoint(tmp_path, files=3)
    (directory / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(
        ConfigurationError, match=r"index\.json names model-00002-of-00003\.safetensors, which is not in"
    ):
        check_weights(directory)


def test_a_tensor_in_no_shard_is_named(tmp_path: Path) -> None:
    """A tensor that the index promises and no file holds is missing."""
    directory = build_checkpoint(tmp_path, files=2)
    tensors = tensors_of()
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if name != Q_PROJ}, files=2)

    with pytest.raises(ConfigurationError, match=f"{re.escape(Q_PROJ)} is not in the checkpoint"):
        load(directory)


def test_an_index_beside_a_single_file_is_not_read(tmp_path: Path) -> None:
    """Neither for the weights nor for their names, as in transformers: it is left of other files."""
    directory = build_checkpoint(tmp_path, files=1)
    stale = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(stale))

    assert stored_names(directory) == open_checkpoint(directory).names != {"lm_head.weight"}


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": ["model.safetensors"]}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    """An index that maps no tensors to files is refused, naming it."""
    directory = build_checkpoint(tmp_path, files=2)
    (directory / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ConfigurationError, match=r"model\.safetensors\.index\.json"):
        check_weights(directory)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "below/outside.safetensors"])
def test_an_index_leads_to_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    """What is read while a daemon serves is below a directory, and this is how a file there could lead out of it."""
    outside = build_checkpoint(tmp_path / "outside") / "model.safetensors"
    directory = build_checkpoint(tmp_path / "inside", files=2)
    (directory / "below").mkdir()
    for link in (directory / "below", tmp_path):
        (link / "outside.safetensors").symlink_to(outside)
    index = {"weight_map": dict.fromkeys(tensors_of(), name.format(outside=outside))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigurationError, match="it may name files beside it alone"):
        check_weights(directory)


@pytest.mark.parametrize("keep", [slice(0), slice(5), slice(200), slice(-1), slice(1, None)])
def test_a_damaged_file_is_named(tmp_path: Path, keep: slice) -> None:
    """A weight file that is empty, cut short or no safetensors at all is refused by name."""
    directory = build_checkpoint(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[keep])

    with pytest.raises(ConfigurationError, match=r"model\.safetensors is corrupt, incomplete .* download it again"):
        load(directory)


@pytest.mark.parametrize("form", [FLOAT32, WeightFormat(np.dtype(np.float32), Layout.MATRIX, scans=True)])
def test_other_weights_are_put_into_the_arrays_that_are_served(tmp_path: Path, form: WeightFormat) -> None:
    """The weights of another source, here arrays in memory, replace those of a decoder, whose arrays are given up."""
    decoder = load(build_checkpoint(tmp_path / "served"), form)
    before = jax.tree.leaves(nnx.state(decoder))
    other = random_tensors(VARIANTS["llama2"].config, seed=99)
    write_tensors(build_checkpoint(tmp_path / "other"), other)

    put(Arrays(other), decoder, form, mesh=one_device(), progress=lambda done, total: None)

    assert_same(decoder, load(tmp_path / "other", form))
    assert all(array.is_deleted() for array in before)


def test_a_source_that_does_not_fit_leaves_the_served_weights_as_they_are(tmp_path: Path) -> None:
    """It is refused by name before any array is given up."""
    directory = build_checkpoint(tmp_path)
    decoder, tensors = load(directory), tensors_of()
    del tensors[Q_PROJ]

    with pytest.raises(ConfigurationError, match=f"arrays in memory: {re.escape(Q_PROJ)} is not in"):
        put(Arrays(tensors), decoder, FLOAT32, mesh=one_device(), progress=lambda done, total: None)

    assert_same(decoder, load(directory))
