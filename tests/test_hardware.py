"""``odriver doctor --tpu``: a report on what the devices do, whole on a CPU too."""

import json

import pytest
from checkpoints import build_checkpoint
from tokenizer_files import build_byte_level, write_tokenizer

from engine.errors import DevicesUnavailable
from engine.hardware import report
from engine.hardware.expert_products import measure_experts
from engine.hardware.measurement import Measurement
from engine.models.weights.forms import InStack
from ipc.commands.cli import main

SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "2", "--page-size", "16", "--num-pages", "20"]
SECTIONS = (
    "measure_memory",
    "measure_kernels",
    "measure_experts",
    "measure_host",
    "measure_collectives",
    "measure_steps",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model whose heads the CPU's kernel reads."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128, "vocab_size": 400}
    return write_tokenizer(build_checkpoint(tmp_path_factory.mktemp("model"), **sizes), build_byte_level())


@pytest.fixture
def nothing_measured(monkeypatch):
    """Every part finds that all is well, at once."""
    for name in SECTIONS:
        monkeypatch.setattr(report, name, lambda *_, name=name: [Measurement(section=name, what="all", state="good")])


@pytest.mark.thorough
def test_a_cpu_is_measured_whole(directory, tmp_path, capsys):
    """Kernels, memory, copies, collectives over two devices and steps; what cannot be measured is named."""
    path = tmp_path / "report.json"

    assert main(["doctor", "--tpu", "--report", str(path), str(directory), *SMALL]) == 0

    written = json.loads(path.read_text())
    found = {(one["section"], one["what"]): one for one in written["measurements"]}
    assert {one["state"] for one in found.values()} == {"good", "measured", "not measured"}
    unmeasured = {section: one["note"] for (section, _), one in found.items() if one["state"] == "not measured"}
    assert unmeasured == {"kernel jax": "it runs on a TPU alone"}
    sections = {section for section, _ in found}
    assert sections >= {
        "memory",
        "arithmetic",
        "experts",
        "host",
        "collectives",
        "steps",
        "kernel xla",
        "kernel pallas, interpreted",
    }
    assert all(one["value"] > 0 for one in found.values() if one["state"] == "measured")
    two = found["steps", "decoding, 2 rows of 64 tokens"]
    assert two["expected"] > 0 and two["note"] == "at best, by the rate of memory measured here"
    assert written["facts"]["devices"] == "2 x cpu (cpu)"
    shown = capsys.readouterr().out
    assert "not measured: it runs on a TPU alone" in shown and "GB/s" in shown


@pytest.mark.usefixtures("nothing_measured")
def test_a_part_that_fails_is_reported_and_the_others_go_on(monkeypatch, capsys):
    """As nobody has tried this hardware before."""
    monkeypatch.setattr(report, "measure_host", lambda *_: 1 / 0)

    assert main(["doctor", "--tpu", "--json"]) == 0

    found = {one["section"]: one for one in json.loads(capsys.readouterr().out)["measurements"]}
    assert [found[name]["state"] for name in SECTIONS if name != "measure_host"] == ["good"] * 5
    assert found["host"]["state"] == "not measured"
    assert found["host"]["note"] == "ZeroDivisionError: division by zero"


@pytest.mark.usefixtures("nothing_measured")
def test_what_is_bad_is_the_exit_code(monkeypatch, capsys):
    """A kernel that is not its twin, say."""
    wrong = Measurement(section="kernel pallas", what="error", value=0.7, expected=0.1, state="bad")
    monkeypatch.setattr(report, "measure_kernels", lambda *_: [wrong])

    assert main(["doctor", "--tpu"]) == 1

    assert "✗" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_measured")
def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    """And so is one of nothing."""
    assert main(["doctor", "--tpu", "--report", str(tmp_path)]) == 78
    assert "the report cannot be written: " in capsys.readouterr().err
    assert main(["doctor", "--report", str(tmp_path / "r.json")]) == 78
    assert "--report is of what --tpu measures: give both" in capsys.readouterr().err


def test_devices_that_are_taken_are_said_to_be(monkeypatch, capsys):
    """With what to do, as at a start."""

    def refuse():
        raise DevicesUnavailable("the TPU is in use")

    monkeypatch.setattr(report, "acquire_devices", refuse)

    assert main(["doctor", "--tpu"]) != 0

    assert "JAX cannot take the accelerator: the TPU is in use. What to do: " in capsys.readouterr().err


def test_a_grouped_product_is_held_against_a_plain_one(monkeypatch):
    """Of experts in the last of several layers, in all forms; one that is wrong is bad."""
    found = {one.what: one for one in measure_experts(1e9)}

    assert [one.state for one in found.values()] == ["good", "measured"] * 3
    assert found["3 of 2 x 4 experts, bfloat16"].expected == pytest.approx(1e6 * 3 * 64 * 96 * 2 / 1e9)
    assert found["3 of 2 x 4 experts, int4"].expected == pytest.approx(1e6 * 3 * 64 * 96 / 2 / 1e9)

    product = InStack.grouped_product
    monkeypatch.setattr(InStack, "grouped_product", lambda form, x, groups: 1.1 * product(form, x, groups))
    assert [one.state for one in measure_experts(1e9)][::2] == ["bad"] * 3
