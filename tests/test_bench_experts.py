"""scripts/bench experts: the models that it writes, and what it makes of two daemons."""

from contextlib import contextmanager

import pytest
from loading import load

from engine.models.model_config import read_model_config
from ipc.benchmark.timeline import Timeline
from scripts.benchmarks import experts
from scripts.benchmarks.experts import GptOss, QwenMoe, measure_experts
from scripts.benchmarks.models import Size, write_model

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("an_idle_machine")]

DENSE = Size(hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, vocabulary=300)


@pytest.mark.parametrize("layout", [QwenMoe, GptOss])
def test_a_model_of_experts_is_one_that_we_serve(tmp_path, layout):
    """Its config and every weight are what the loader calls for; a token's experts are as wide as the dense model."""
    write_model(tmp_path / "model", layout(dense=DENSE, experts=6, each=3))

    (block, _) = read_model_config(tmp_path / "model").blocks
    load(tmp_path / "model")

    assert (block.feed_forward.num_experts, block.feed_forward.experts_per_token) == (6, 3)
    assert block.feed_forward.intermediate_size * 3 == DENSE.ffn


class Clockwork:
    """Makes ``rate`` tokens a second of each request."""

    name = "oDriver"

    def __init__(self, rate):
        self._rate = rate

    def run(self, workload):
        arrivals = [((number + 1) / self._rate, 1) for number in range(workload.max_tokens)]
        return [Timeline(len(prompt), 0.0, arrivals) for prompt in workload.prompts]


def test_the_figures_are_ratios_to_the_dense_model(tmp_path, monkeypatch):
    """A daemon of 30 tokens a second beside a dense one of 40."""

    @contextmanager
    def serving(directory, settings):
        assert settings[-2:] == ["--dtype", "bfloat16"]
        yield Clockwork(40 if directory.name == "small" else 30), []

    monkeypatch.setattr(experts, "serving", serving)
    monkeypatch.setattr(experts, "written", lambda name, shape: tmp_path / name)

    figures = list(measure_experts(["--dtype", "bfloat16"], 1))

    assert [figure.benchmark for figure in figures] == ["experts qwen3-moe"] * 3 + ["experts gpt-oss"] * 3
    assert [round(figure.ratios["dense"], 2) for figure in figures] == [0.75] * 6
