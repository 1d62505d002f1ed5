"""``odriver plan``: the arithmetic, the words where it cannot be, and, where libtpu is installed, the compiler's report."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from caching.tpu_chip import CHIPS
from caching.tpu_kernels import JAX, PALLAS
from engine.backend import tpu_backend
from engine.chip_plan import Roofline, batch_sizes
from engine.chip_planner import pages_read
from engine.execution_manager import StepShapes
from engine.hlo_traffic import Moved
from engine.models.families import read_config_file
from ipc.cli import main

CONFIGS = Path(__file__).parent / "configs"


def write_config(directory, name, **changed):
    """A directory with a config.json, and nothing else: one of CONFIGS with some of it changed."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | changed))
    return path


def test_a_step_must_read_weights_pages_and_logits():
    """Llama-3-8B on a v6e: 15 GB of weights but for the embedding, 128 kB a token of context, 501 kB of logits a sequence."""
    model, chip = read_config_file(CONFIGS / "Llama-3-8B.json"), CHIPS["TPU v6 lite"]

    bfloat16 = np.dtype(jnp.bfloat16)
    step = Roofline(chip, model, bfloat16, bfloat16, 16_000_000_000).step(4, 1000, Moved(20_000_000_000, 500_000_000))

    weights = 16_000_000_000 - 2 * 128256 * 4096
    assert step.bytes_needed == weights + 4 * 1000 * 131072 + 4 * 4 * 128256
    assert (step.bytes_read, step.bytes_written) == (20_000_000_000, 500_000_000)
    assert step.bandwidth_seconds == pytest.approx(20.5e9 / 1.64e12)
    assert step.tokens_per_second == pytest.approx(4 / step.bandwidth_seconds)
    assert step.compute_seconds == pytest.approx(4 * (weights + 4 * 32 * 128 * 32 * 1000) / 918e12)


@pytest.mark.parametrize(("kernel", "tokens"), [(JAX, 2 * 5 * 128), (PALLAS, 32 * 32)])
def test_attention_reads_what_its_kernel_moves_at_once(kernel, tokens):
    """Of 1,000 tokens of 8 kv heads on a v6e jax's kernel reads two blocks of five pages of 128, ours quarters of pages."""
    chip = CHIPS["TPU v6 lite"]
    model = read_config_file(CONFIGS / "Llama-3-8B.json")
    page = tpu_backend(chip, kernel).one_page(model, 128, np.dtype(jnp.bfloat16))

    assert pages_read(kernel, chip, StepShapes(64, 512, 8192, page), 1000) == tokens * 2 * 8 * 128 * 2


def test_batch_sizes_are_powers_of_four_and_the_most():
    """The largest is what the operator set."""
    assert batch_sizes(64) == [1, 4, 16, 64]
    assert batch_sizes(100) == [1, 4, 16, 64, 100]
    assert batch_sizes(1) == [1]


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
    ("name", "topology", "settings"),
    [
        ("Llama-3-8B", "v5e:2x4", []),
        ("Qwen3-8B", "v6e:2x4", []),
        ("Llama-3-8B", "v5e:2x4", ["--quantization", "int8", "--kv-cache-dtype", "fp8"]),
    ],
)
def test_nothing_large_is_copied(tmp_path, capsys, name, topology, settings):
    """Of each model's layers, two are compiled: no copies of weights or pages, and little scratch while decoding.

    Nor are weights of 8 bits written out in more.
    """
    path = write_config(tmp_path, name, num_hidden_layers=2)

    assert (
        main(
            [
                "plan",
                str(path),
                "--topology",
                topology,
                "--json",
                "--max-num-batched-tokens",
                "8",
                "--max-num-seqs",
                "8",
                *settings,
            ]
        )
        == 0
    )

    plan = json.loads(capsys.readouterr().out)
    assert [bucket["tokens"] for bucket in plan["buckets"]] == [1, 4, 8]
    assert [(bucket["copies"], bucket["gathers"]) for bucket in plan["buckets"]] == [([], [])] * 3
    assert plan["buckets"][-1]["scratch_bytes"] < 64 * 2**20
    assert plan["weights"] + plan["pages"] + plan["scratch"] <= plan["budget"]
    assert plan["context_tokens"] == (plan["num_pages"] - 1) * plan["page_size"] > 0
    assert [step["sequences"] for step in plan["decode"]] == [1, 4, 8]
    assert all(step["bytes_needed"] < step["bytes_read"] < 1.1 * step["bytes_needed"] for step in plan["decode"])


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
