"""On a CPU a row is the same to the bit, whoever is beside it and however its prompt was cut, on every instruction set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from kernels_needed import kernels_needed
from xla_flags import MAX_ISA

from caching import instruction_set
from caching.instruction_set import available
from engine.errors import ConfigurationError
from engine.models.weights import panels
from engine.step.backend_choice import choose_backend
from engine.step.compilation import lower

ROOT = Path(__file__).parent.parent
PANEL_WIDTH = {"baseline": 8, "avx2": 16, "avx512": 32, "avx512vnni": 32}
MODELS = ["model qwen3 float32", "model llama2 float32 int8", "model llama_linear bfloat16"]
MODELS += ["model qwen2_moe float32 int8", "model gpt_oss float32"]
FUNCTIONS = ["norm", "logprobs", "penalties", "mixed weights"]
DRAWS = ["mixed", "temperature weights", "truncated weights", "temperature", "truncated"]
"""Of which "mixed" has both, in one batch, and draws with the weights of "mixed weights"."""

with kernels_needed():
    panels.panel_width()


@pytest.mark.parametrize(
    ("isa", "cases"),
    [
        pytest.param(isa, cases, marks=pytest.mark.thorough)
        for isa in dict.fromkeys(("avx2", available()[-1]))
        if isa in available()
        for cases in (FUNCTIONS, [*MODELS, *DRAWS])
    ],
)
def test_a_row_is_the_same_to_the_bit_alone_and_in_any_company(tmp_path: Path, isa: str, cases: list[str]) -> None:
    """Hidden states and logits of models, prompts at once and in chunks; and each function of a step over wide rows.

    In a process whose kernels, and XLA, are held to an instruction set, with several threads to cut work between.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        instruction_set.VARIABLE: isa,
        "XLA_FLAGS": f"--xla_cpu_max_isa={MAX_ISA[isa]}",
        "NPROC": "4",
    }

    program = [sys.executable, Path(__file__).parent / "same_bits.py", tmp_path, *cases]
    run = subprocess.run(program, env=environment, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("panel width") == PANEL_WIDTH[isa]
    assert found == dict.fromkeys(cases, 0)


def test_no_library_takes_sums_over_from_xla() -> None:
    """What is compiled for a CPU has no fusion of another library's, whose sums depend on how many rows there are."""
    rows = jax.ShapeDtypeStruct((64, 512), "float32")

    compiled = lower(lambda x: jax.numpy.exp(x) / jax.numpy.sum(x * x, axis=-1, keepdims=True), rows).compile()

    assert "kCustom" not in compiled.as_text()


def test_a_daemon_does_not_start_with_instructions_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of the configuration, and no reason to serve by XLA alone."""
    from caching import cpu_kernels

    cpu_kernels.loading.cache_clear()
    monkeypatch.setenv(instruction_set.VARIABLE, "sse")

    with pytest.raises(ConfigurationError, match="ODRIVER_CPU_ISA must be"):
        choose_backend(16, 64, jax.numpy.dtype("float32"))

    cpu_kernels.loading.cache_clear()
