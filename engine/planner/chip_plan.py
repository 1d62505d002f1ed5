"""The plan for serving on TPU chips, and the roofline of a step."""

from dataclasses import dataclass

import msgspec
import numpy as np

from caching.tpu.tpu_chip import Chip
from engine.models.partition import Partition
from engine.planner.compiled_function import CompiledFunction
from engine.planner.hlo_traffic import Moved


class DecodeStep(msgspec.Struct, frozen=True):
    """The roofline of a decoding step, one token per sequence. Bytes are those of one chip."""

    sequences: int
    bytes_needed: int
    """Lower bound on reads: weights, the sequences' keys and values, and logits."""
    bytes_read: int
    """Reads of the compiled step and the greedy sampler, with pages as the kernel reads them."""
    bytes_written: int
    bandwidth_seconds: float
    """Time of these reads and writes."""
    compute_seconds: float
    exchange_seconds: float
    """Time in which chips wait for collectives."""
    tokens_per_second: float
    """From the longer of bandwidth and compute time, plus the exchange."""


class ChipPlan(msgspec.Struct, frozen=True):
    """A model on the chips of a topology. Bytes are those of one chip, unless a name says more."""

    model: str
    topology: str
    chip: str
    chips: int
    """Chips of the topology."""
    tensor_parallel_size: int
    """Chips that the model is sharded over."""
    hbm: int
    budget: int
    """The part of ``hbm`` that may be used."""
    weights: int
    scratch: int
    """Reserved for the largest step and the sampler."""
    pages: int
    num_pages: int
    page_size: int
    """Tokens in a page."""
    context_tokens: int
    """Capacity of all pages together, in tokens."""
    max_model_len: int
    """Tokens."""
    tokens_a_sequence: int
    """Context of each sequence in ``decode``."""
    functions: list[CompiledFunction]
    """Every function that a daemon compiles before READY: steps, samplers, logits processors."""
    compile_seconds: float
    """Wall time of all compilations, with one per core of this machine at a time."""
    decode: list[DecodeStep]

    @property
    def steps(self) -> list[CompiledFunction]:
        """The functions that run the model's layers, by ascending size."""
        return sorted((one for one in self.functions if one.name == "step"), key=lambda one: one.size)


@dataclass(frozen=True)
class Roofline:
    """A roofline (Williams et al. 2009) of a chip with its shard of a model."""

    chip: Chip
    partition: Partition
    """The model, sharded over the chips."""
    dtype: np.dtype
    kv_dtype: np.dtype
    weight_bytes: int
    """Of one chip's shard."""

    def step(self, sequences: int, tokens: int, moved: Moved, exchange_seconds: float) -> DecodeStep:
        """A step of sequences of ``tokens`` tokens each. ``moved`` is its traffic on a chip."""
        flops = sequences * (2 * self._read_weights // self.dtype.itemsize + self._flops_of_attention(tokens))
        bandwidth = (moved.read + moved.written) / self.chip.hbm_bandwidth
        compute = flops / self.chip.bf16_flops
        return DecodeStep(
            sequences=sequences,
            bytes_needed=self._read_weights + sequences * self._bytes_a_sequence(tokens),
            bytes_read=moved.read,
            bytes_written=moved.written,
            bandwidth_seconds=bandwidth,
            compute_seconds=compute,
            exchange_seconds=exchange_seconds,
            tokens_per_second=sequences / (max(bandwidth, compute) + exchange_seconds),
        )

    @property
    def _read_weights(self) -> int:
        """All but the embedding, of which a step reads one row per token."""
        model = self.partition.model
        table = self.partition.padded_vocab_size // self._chips * model.hidden_size * self.dtype.itemsize
        return self.weight_bytes - (0 if model.tied_embeddings else table)

    def _bytes_a_sequence(self, tokens: int) -> int:
        """Keys, values and float32 logits."""
        model = self.partition.model
        key_and_value = 2 * self.partition.kv_heads_each * model.attention.head_dim * self.kv_dtype.itemsize
        return self._seen(tokens) * key_and_value + 4 * model.vocab_size // self._chips

    def _flops_of_attention(self, tokens: int) -> int:
        attention = self.partition.model.attention
        return 4 * attention.num_heads // self._chips * attention.head_dim * self._seen(tokens)

    def _seen(self, tokens: int) -> int:
        """Keys that a token attends to, summed over the layers."""
        return sum(min(tokens, block.mixer.scores.window or tokens) for block in self.partition.model.blocks)

    @property
    def _chips(self) -> int:
        return self.partition.devices


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of four, and the maximum."""
    return sorted({4**power for power in range(10) if 4**power < max_num_seqs} | {max_num_seqs})
