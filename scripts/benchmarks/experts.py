"""Mixtures of experts beside a dense model that reads as many weights a token: what routing costs, and reading here and there.

With one row both read the same bytes. With several the experts of all rows are read, up to all of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.benchmarks.clients.rates import decode_rate
from scripts.benchmarks.clients.workload import Prompts, Workload
from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.models import SIZES, Size, written
from scripts.benchmarks.peers.systems import serving
from scripts.benchmarks.serve import take_turns

DENSE = "dense"
AT_ONCE = (1, 4, 8)
PROMPT, OUTPUT = 16, 128
SLIDING_WINDOW = 128
LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "256")
"""Two daemons run at once."""


@dataclass(frozen=True, kw_only=True)
class QwenMoe:
    """``dense`` in the layout of Qwen3-MoE: so many experts, of which a token's are as wide as its feed-forward."""

    dense: Size
    experts: int
    each: int

    @property
    def vocabulary(self) -> int:
        """See ModelShape."""
        return self.dense.vocabulary

    @property
    def columns(self) -> int:
        """Of one expert."""
        return self.dense.ffn // self.each

    def config(self) -> dict[str, object]:
        """See ModelShape."""
        return self.dense.config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.each,
            "moe_intermediate_size": self.columns,
            "norm_topk_prob": True,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See ModelShape."""
        yield from ((name, shape) for name, shape in self.dense.tensors() if ".mlp." not in name)
        for layer in range(self.dense.layers):
            for name, shape in self._layer():
                yield f"model.layers.{layer}.{name}", shape

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.dense.hidden
        yield from ((f"self_attn.{name}_norm.weight", (self.dense.head_dim,)) for name in "qk")
        yield "mlp.gate.weight", (self.experts, hidden)
        for expert in range(self.experts):
            yield from ((f"mlp.experts.{expert}.{name}_proj.weight", (self.columns, hidden)) for name in ("gate", "up"))
            yield f"mlp.experts.{expert}.down_proj.weight", (hidden, self.columns)


@dataclass(frozen=True, kw_only=True)
class GptOss(QwenMoe):
    """The same in the layout of gpt-oss: tensors of all experts, biases, sinks, and windows in every second layer."""

    def config(self) -> dict[str, object]:
        """See ModelShape."""
        return self.dense.config() | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "intermediate_size": self.columns,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.each,
            "sliding_window": SLIDING_WINDOW,
            "rope_scaling": None,
        }

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        dense, both = self.dense, 2 * self.columns
        kv = dense.kv_heads * dense.head_dim
        for name, size in {"q": dense.hidden, "k": kv, "v": kv, "o": dense.hidden}.items():
            yield f"self_attn.{name}_proj.bias", (size,)
        yield "self_attn.sinks", (dense.heads,)
        yield "mlp.router.weight", (self.experts, dense.hidden)
        yield "mlp.router.bias", (self.experts,)
        yield "mlp.experts.gate_up_proj", (self.experts, dense.hidden, both)
        yield "mlp.experts.gate_up_proj_bias", (self.experts, both)
        yield "mlp.experts.down_proj", (self.experts, self.columns, dense.hidden)
        yield "mlp.experts.down_proj_bias", (self.experts, dense.hidden)


MODELS = {
    "qwen3-moe": QwenMoe(dense=SIZES["small"], experts=64, each=8),
    "gpt-oss": GptOss(dense=SIZES["small"], experts=32, each=4),
}
"""1.9 GB each in float32, far more than a processor's cache."""


def measure_experts(settings: Sequence[str], repeats: int) -> Iterator[Figure]:
    """Tokens a second of each model and of ``small``, in turns, each by a daemon with these settings."""
    dense = written("small", SIZES["small"])
    for name, shape in MODELS.items():
        prompts = Prompts(shape.vocabulary)
        yield from _measure(name, written(name, shape), dense, [*LIMITS, *settings], prompts, repeats)


def _measure(
    name: str, directory: Path, dense: Path, settings: list[str], prompts: Prompts, repeats: int
) -> Iterator[Figure]:
    with serving(directory, settings) as (ours, _), serving(dense, settings) as (other, _):
        other.name = DENSE
        for rows in AT_ONCE:
            runs = take_turns([ours, other], partial(_workload, prompts, rows), repeats)
            rates = {system: [decode_rate(run) for run in repetitions] for system, repetitions in runs.items()}
            label = f"decode, {rows} at once"
            yield figure(f"experts {name}", label, "tok/s", rates[ours.name], others={DENSE: rates[DENSE]})


def _workload(prompts: Prompts, rows: int) -> Workload:
    return Workload(prompts.take(rows, PROMPT), OUTPUT)
