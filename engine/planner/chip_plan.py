"""What serving on TPU chips would be like: what a plan says, and what a step comes to at best."""

from dataclasses import dataclass

import msgspec
import numpy as np

from caching.tpu.tpu_chip import Chip
from engine.models.partition import Partition
from engine.planner.compiled_function import CompiledFunction
from engine.planner.hlo_traffic import Moved


class DecodeStep(msgspec.Struct, frozen=True):
    """What a step of one token for each of so many sequences comes to, at best. Bytes are those of one chip."""

    sequences: int
    bytes_needed: int
    """To read: weights, the keys and values that the sequences have, and logits."""
    bytes_read: int
    """That the compiled step and the greedy sampler read: pages as the attention kernel does, and whatever else."""
    bytes_written: int
    bandwidth_seconds: float
    """To read and write them."""
    compute_seconds: float
    exchange_seconds: float
    """That chips wait for each other."""
    tokens_per_second: float
    """By the slower of the first two, and the third."""


class ChipPlan(msgspec.Struct, frozen=True):
    """Everything about a model on chips of a topology. Bytes are those of one chip, unless a name says otherwise."""

    model: str
    topology: str
    chip: str
    chips: int
    """That the topology has."""
    tensor_parallel_size: int
    """Those that the model is split over."""
    hbm: int
    budget: int
    """What may be used of it."""
    weights: int
    scratch: int
    """Kept free for the largest step and the sampler."""
    pages: int
    num_pages: int
    page_size: int
    """Tokens in a page."""
    context_tokens: int
    """That fit in all pages together."""
    max_model_len: int
    """Tokens."""
    tokens_a_sequence: int
    """What the steps below are reckoned for."""
    functions: list[CompiledFunction]
    """All that a daemon compiles before it is READY: the steps, and what is between logits and tokens."""
    compile_seconds: float
    """From the first to the last, as many at a time as this machine has cores."""
    decode: list[DecodeStep]

    @property
    def steps(self) -> list[CompiledFunction]:
        """Of the functions those that have a layer in them, from the smallest on."""
        return sorted((one for one in self.functions if one.name == "step"), key=lambda one: one.size)


@dataclass(frozen=True)
class Roofline:
    """A chip that does nothing but move and multiply (Williams et al. 2009), and the part of a model that it has."""

    chip: Chip
    partition: Partition
    """The model, split over the chips."""
    dtype: np.dtype
    kv_dtype: np.dtype
    weight_bytes: int
    """Of one chip's part."""

    def step(self, sequences: int, tokens: int, moved: Moved, exchange_seconds: float) -> DecodeStep:
        """A step of sequences that hold so many tokens each, of which a chip's program moves so much."""
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
        """All but the embedding, of which a step reads a row for each token."""
        model = self.partition.model
        table = self.partition.padded_vocab_size // self._chips * model.hidden_size * self.dtype.itemsize
        return self.weight_bytes - (0 if model.tied_embeddings else table)

    def _bytes_a_sequence(self, tokens: int) -> int:
        """Keys and values, and logits in float32."""
        model = self.partition.model
        key_and_value = 2 * self.partition.kv_heads_each * model.attention.head_dim * self.kv_dtype.itemsize
        return self._seen(tokens) * key_and_value + 4 * model.vocab_size // self._chips

    def _flops_of_attention(self, tokens: int) -> int:
        attention = self.partition.model.attention
        return 4 * attention.num_heads // self._chips * attention.head_dim * self._seen(tokens)

    def _seen(self, tokens: int) -> int:
        """Keys that a token sees, in all layers together."""
        return sum(min(tokens, block.mixer.scores.window or tokens) for block in self.partition.model.blocks)

    @property
    def _chips(self) -> int:
        return self.partition.devices


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of four, and the most."""
    return sorted({4**power for power in range(10) if 4**power < max_num_seqs} | {max_num_seqs})
