"""The roofline of a step on TPU chips."""

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from caching.tpu.tpu_chip import Chip
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.mixer import State
from engine.models.partition import Partition
from engine.models.weights.store import declared_entries, parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat, table_width
from engine.planner.experts_read import expert_bytes, share_read
from engine.planner.hlo_traffic import Moved


class DecodeStep(msgspec.Struct, frozen=True):
    """The roofline of a decoding step, of a token per sequence and its drafts. Bytes are those of
    one chip."""

    sequences: int
    bytes_needed: int
    """Lower bound on reads: weights, the sequences' keys, values and states, and logits. Of a
    mixture's experts those that ``experts_read`` says."""
    bytes_read: int
    """Reads of the compiled step and the greedy sampler, with pages as the kernel reads them."""
    bytes_written: int
    bandwidth_seconds: float
    """Time of these reads and writes."""
    compute_seconds: float
    exchange_seconds: float
    """Time in which chips wait for collectives."""
    tokens_per_second: float
    """From the longer of bandwidth and compute time, plus the exchange and drafting, if no draft is
    accepted."""
    experts_read: float | None = None
    """Share of a chip's experts that is read, an estimate: see ``share_read``. None without."""
    drafts: int = 0
    """Drafted tokens of each sequence that the step verifies."""
    drafting_seconds: float = 0.0
    """Time in which a draft model reads its weights to draft them."""

    def tokens_per_second_at(self, acceptance: float) -> float:
        """The same if each draft is accepted with this probability where those before it are
        (Leviathan et al. 2023, section 3.1)."""
        return self.tokens_per_second * sum(acceptance**place for place in range(1 + self.drafts))


class PromptStep(msgspec.Struct, frozen=True):
    """The roofline of a step that computes tokens of a prompt. Bytes are those of one chip."""

    tokens: int
    bytes_read: int
    """Reads of the compiled step, of which each of the prompt's pages is read once."""
    bytes_written: int
    bandwidth_seconds: float
    compute_seconds: float
    """A token attends to half of the prompt, as it does on average, and one is sampled from."""
    exchange_seconds: float
    tokens_per_second: float
    """From the longer of bandwidth and compute time, plus the exchange."""


@dataclass(frozen=True)
class Roofline:
    """A roofline (Williams et al. 2009) of a chip with its shard of a model."""

    chip: Chip
    partition: Partition
    """The model, sharded over the chips."""
    form: WeightFormat
    """Of the weights."""
    kv_dtype: np.dtype
    weight_bytes: int
    """Of one chip's shard."""
    state_bytes: int = 0
    """Of a sequence's recurrent states, on one chip."""

    def step(
        self,
        sequences: int,
        tokens: int,
        moved: Moved,
        exchange_seconds: float,
        drafts: int = 0,
        read_to_draft: int = 0,
    ) -> DecodeStep:
        """A step of sequences of ``tokens`` tokens each. ``moved`` is its traffic on a chip.

        ``read_to_draft`` are the bytes that a chip reads of a draft model's weights, or a head's.
        """
        drafting = read_to_draft / self.chip.hbm_bandwidth
        computed = sequences * (1 + drafts)
        experts, all_experts = self._read_experts(computed), sum(self._experts.values())
        weights = self._read_weights - all_experts + experts
        bandwidth = (moved.read + moved.written) / self.chip.hbm_bandwidth
        compute = self._compute_seconds(computed, tokens, computed)
        return DecodeStep(
            sequences=sequences,
            bytes_needed=weights + sequences * self._bytes_a_sequence(tokens) + computed * self._logit_bytes,
            bytes_read=moved.read,
            bytes_written=moved.written,
            bandwidth_seconds=bandwidth,
            compute_seconds=compute,
            exchange_seconds=exchange_seconds,
            tokens_per_second=sequences / (max(bandwidth, compute) + exchange_seconds + drafting),
            experts_read=experts / all_experts if all_experts else None,
            drafts=drafts,
            drafting_seconds=drafting,
        )

    def prompt(self, tokens: int, length: int, moved: Moved, exchange_seconds: float) -> PromptStep:
        """A step of ``tokens`` tokens of a prompt of a ``length``. ``moved`` is its traffic on a chip."""
        bandwidth = (moved.read + moved.written) / self.chip.hbm_bandwidth
        compute = self._compute_seconds(tokens, length // 2, 1)
        return PromptStep(
            tokens=tokens,
            bytes_read=moved.read,
            bytes_written=moved.written,
            bandwidth_seconds=bandwidth,
            compute_seconds=compute,
            exchange_seconds=exchange_seconds,
            tokens_per_second=tokens / (max(bandwidth, compute) + exchange_seconds),
        )

    def _compute_seconds(self, computed: int, seen: int, sampled: int) -> float:
        """Of products and attention of so many tokens that each see ``seen``, and of the logits of
        those that are sampled from."""
        head = self.partition.padded_vocab_size // self._chips * self.partition.model.hidden_size
        others = self._multiplied_weights - self._int8_weights - head
        flops = computed * (2 * others + self._flops_of_attention(seen)) + sampled * 2 * head
        return flops / self.chip.bf16_flops + computed * 2 * self._int8_weights / self.chip.int8_ops

    @property
    def table_bytes(self) -> int:
        """Of a chip's part of the table of logits."""
        return self.partition.padded_vocab_size // self._chips * self._row_bytes

    @property
    def _read_weights(self) -> int:
        """Bytes of all but the embedding and the table of positions, of which a step reads a row per token."""
        return self.weight_bytes - self._unread_rows * self._row_bytes - self._positions * self.form.dtype.itemsize

    @property
    def _row_bytes(self) -> int:
        """Of a table."""
        width = table_width(self.partition.model.hidden_size, Layout.MATRIX)
        return width if self.form.activations else width * self.form.dtype.itemsize

    @property
    def _multiplied_weights(self) -> int:
        """Weights that a token is multiplied by on a chip, on average over the chips."""
        one_byte = WeightFormat(np.dtype(np.int8))
        numbers, experts = parameter_bytes(self.partition, one_byte), expert_bytes(self.partition, one_byte)
        each = (count * spec.experts_per_token // spec.num_experts for spec, count in experts.items())
        rows = self._unread_rows * self.partition.model.hidden_size + self._positions
        return numbers - rows - sum(experts.values()) + sum(each)

    @cached_property
    def _int8_weights(self) -> int:
        """Those of them that int8 numbers are multiplied by."""
        return sum(
            len(entry.sources) * math.prod(entry.parameter.part(self._chips))
            for entry in declared_entries(self.partition)
            if self.form.has_int8_products(entry.parameter)
        )

    @property
    def _unread_rows(self) -> int:
        """Rows of a chip's embedding, if it is not the head too."""
        return 0 if self.partition.model.tied_embeddings else self.partition.padded_vocab_size // self._chips

    @property
    def _positions(self) -> int:
        """The numbers of the table of positions, which each chip has."""
        return self.partition.model.position_rows * self.partition.model.hidden_size

    @property
    def _experts(self) -> dict[ExpertsSpec, int]:
        return expert_bytes(self.partition, self.form)

    def _read_experts(self, tokens: int) -> int:
        """Bytes of experts that a step of so many tokens reads."""
        return sum(int(nbytes * share_read(spec, tokens, self._chips)) for spec, nbytes in self._experts.items())

    def _bytes_a_sequence(self, tokens: int) -> int:
        """Keys, values and states."""
        model = self.partition.model
        vectors = (1 if model.has_latents else 2) * self.partition.kv_heads_each
        keys_and_values = self._seen(tokens) * vectors * model.head_dim * self.kv_dtype.itemsize
        return keys_and_values + self.state_bytes

    @property
    def _logit_bytes(self) -> int:
        """Of a token, in float32."""
        return 4 * self.partition.model.vocab_size // self._chips

    def _flops_of_attention(self, tokens: int) -> int:
        return sum(mixer.flops(tokens, self._chips) for mixer in self.partition.model.mixers)

    def _seen(self, tokens: int) -> int:
        """Keys that a token attends to, summed over the layers."""
        every = (mixer.cached for mixer in self.partition.model.mixers)
        return sum(min(tokens, cached.reach or tokens) for cached in every if not isinstance(cached, State))

    @property
    def _chips(self) -> int:
        return self.partition.devices
