"""``odriver plan``: the arithmetic, the words where it cannot be, and, where libtpu is installed, the compiler's report."""

import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest

from caching.tpu_chip import CHIPS
from engine.backend import tpu_backend
from engine.chip_plan import batch_sizes, count_copies, decode_step
from engine.models.families import read_config_file
from ipc.cli import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CONFIGS = {
    "Llama-3-8B": {**LLAMA, **dict(zip(SIZES, (4096, 14336, 32, 32), strict=True))},
    "Llama-3-70B": {**LLAMA, **dict(zip(SIZES, (8192, 28672, 80, 64), strict=True))},
    "Qwen3-8B": {**QWEN3, **dict(zip(SIZES, (4096, 12288, 36, 32), strict=True))},
    "Qwen3-32B": {**QWEN3, **dict(zip(SIZES, (5120, 25600, 64, 64), strict=True))},
}


def write_config(directory, name, **changed):
    """A directory with the config.json of one of CONFIGS, and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | changed))
    return path


def test_a_step_moves_weights_pages_and_logits(tmp_path):
    """Llama-3-8B on a v6e: 7.5 G weights but for the embedding, 128 kB a token of context, 501 kB of logits a sequence."""
    model = read_config_file(write_config(tmp_path, "Llama-3-8B"))
    chip = CHIPS["TPU v6 lite"]
    page = tpu_backend(chip).one_page(model, 128, np.dtype(jnp.bfloat16))

    step = decode_step(model, page, chip, 16_000_000_000, 4, 1000, 64)

    weights = 16_000_000_000 - 2 * 128256 * 4096
    assert step.bytes_needed == weights + 4 * 1000 * 131072 + 4 * 4 * 128256
    assert step.bytes_moved - step.bytes_needed == 4 * (2 * 5 * 128 - 1000) * 131072  # two blocks of 5 pages each
    assert step.bandwidth_seconds == pytest.approx(step.bytes_moved / 1.64e12)
    assert step.tokens_per_second == pytest.approx(4 / step.bandwidth_seconds)
    assert step.compute_seconds == pytest.approx(4 * (weights + 4 * 32 * 128 * 32 * 1000) / 918e12)


def test_batch_sizes_are_powers_of_four_and_the_most():
    """The largest is what the operator set."""
    assert batch_sizes(64) == [1, 4, 16, 64]
    assert batch_sizes(100) == [1, 4, 16, 64, 100]
    assert batch_sizes(1) == [1]


def test_copies_of_what_is_large_are_counted():
    """From HBM to HBM, of a size that is looked for: not into a memory of the chip, and not of activations."""
    program = """
  %copy.41 = bf16[4096,8,6,128]{0,3,2,1:T(8,128)(2,1)} copy(%weights_2_.1), sharding={replicated}
  %copy-start.1 = (bf16[4096,6144]{1,0:T(8,128)(2,1)}, bf16[4096,6144]{1,0}, u32[]{:S(2)}) copy-start(%weights_1_.1)
  %copy-start.2 = (bf16[4096,6144]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,6144]{1,0}, u32[]{:S(2)}) copy-start(%weights_3_.1)
  %copy.42 = bf16[64,4096]{1,0:T(8,128)(2,1)} copy(%fusion.3)
"""

    assert count_copies(program, {2 * 4096 * 6144}) == 2


def test_without_libtpu_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    """A configuration error, in plain words."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name))

    assert main(["plan", str(write_config(tmp_path, "Qwen3-8B")), "--topology", "v5e:2x4"]) == 78

    assert 'libtpu, which compiles for v5e:2x4, is not installed: pip install "odriver[tpu]"' in capsys.readouterr().err


@pytest.fixture(scope="module")
def _libtpu():
    pytest.importorskip("libtpu")


@pytest.mark.usefixtures("_libtpu")
@pytest.mark.parametrize(
    ("name", "topology"),
    [("Llama-3-8B", "v5e:2x4"), ("Llama-3-70B", "v6e:2x4"), ("Qwen3-8B", "v6e:2x4"), ("Qwen3-32B", "v5e:2x4")],
)
def test_nothing_large_is_copied(tmp_path, capsys, name, topology):
    """Of each model's layers, two are compiled: no copies of weights or pages, and little scratch while decoding."""
    path = write_config(tmp_path, name, num_hidden_layers=2)

    assert main(["plan", str(path), "--topology", topology, "--json", "--max-num-batched-tokens", "64"]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert [bucket["tokens"] for bucket in plan["buckets"]] == [1, 8, 64]
    assert [bucket["copies"] for bucket in plan["buckets"]] == [0, 0, 0]
    assert plan["buckets"][-1]["scratch_bytes"] < 64 * 2**20
    assert plan["weights"] + plan["pages"] + plan["scratch"] <= plan["budget"]
    assert plan["context_tokens"] == (plan["num_pages"] - 1) * plan["page_size"] > 0
    assert [step["sequences"] for step in plan["decode"]] == [1, 4, 16, 64]


@pytest.mark.usefixtures("_libtpu")
@pytest.mark.parametrize("name", ["Llama-3-8B", "Llama-3-70B", "Qwen3-32B"])
def test_what_does_not_fit_is_refused_with_the_arithmetic(tmp_path, capsys, name):
    """Before anything is compiled."""
    assert main(["plan", str(write_config(tmp_path, name).parent), "--topology", "v5e:2x4"]) == 78

    assert "too few for one page for each of max_num_seqs 64 sequences and the sink, beside" in capsys.readouterr().err


@pytest.mark.usefixtures("_libtpu")
def test_a_topology_that_is_none_is_refused(tmp_path, capsys):
    """With libtpu's words."""
    assert main(["plan", str(write_config(tmp_path, "Qwen3-8B")), "--topology", "v5e:3x5"]) == 78

    assert "libtpu cannot compile for 'v5e:3x5'; names are like v5e:2x4 (" in capsys.readouterr().err
