"""What a step takes on a device that is not there: eight TPU v5e chips that serve Llama-3-8B.

A step takes the longer of reading what it reads and of multiplying what it multiplies, and a fixed time. That is the
roofline, so every second here is a lower bound; what policies do to each other it tells well enough.
"""

from dataclasses import dataclass

from engine.scheduling.plan import NextIterationPlan


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """All chips together, as if the work were spread evenly over them.

    Figures of a chip are those of https://cloud.google.com/tpu/docs/v5e: 16 GB at 819 GB/s, 197 TFLOP/s in bfloat16.
    ``overhead`` is taken, not measured: 0.3 ms of host (scripts/bench host, 64 rows) and 64 all-reduces of 25 us.
    """

    chips: int = 8
    memory: float = 8 * 16e9
    bandwidth: float = 8 * 819e9
    flops: float = 8 * 197e12
    overhead: float = 1.9e-3
    """Seconds."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Llama-3-8B, from its config.json; weights and pages in bfloat16."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    itemsize: int = 2

    @property
    def layer_parameters(self) -> int:
        """Those that every token is multiplied with, in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_parameters(self) -> int:
        """Those of the logits, which only rows that sample need; the embedding has as many and is looked up."""
        return self.hidden * self.vocabulary

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize


class CostModel:
    """Seconds that a plan takes, and the pages that fit beside the weights."""

    def __init__(self, model: Transformer, device: Accelerator) -> None:
        self._device = device
        self._weights = (model.layer_parameters + model.head_parameters) * model.itemsize
        self._memory_left = 0.9 * device.memory - self._weights - model.head_parameters * model.itemsize
        self._bytes_per_token = model.bytes_per_token
        self._flop_per_token = 2 * model.layer_parameters
        self._flop_per_row = 2 * model.head_parameters
        self._flop_per_pair = 4 * model.heads * model.head_dim * model.layers

    def num_pages(self, page_size: int) -> int:
        """Pages in 0.9 of the memory, as the engine takes them, the sink included."""
        return int(self._memory_left / (page_size * self._bytes_per_token))

    def seconds(self, plan: NextIterationPlan) -> float:
        """The longer of reading weights and contexts and of multiplying, and the overhead."""
        decodes = plan.num_decodes
        context = sum(plan.starts) + plan.num_tokens
        pairs = sum(plan.starts[:decodes]) + decodes
        for start, count in zip(plan.starts[decodes:], plan.counts[decodes:], strict=True):
            pairs += count * start + count * (count + 1) // 2
        flop = plan.num_tokens * self._flop_per_token + plan.num_rows * self._flop_per_row + pairs * self._flop_per_pair
        read = self._weights + context * self._bytes_per_token
        return max(read / self._device.bandwidth, flop / self._device.flops) + self._device.overhead
