"""What a decoder looks like: the numbers that a checkpoint's ``config.json`` comes down to."""

from dataclasses import dataclass
from itertools import groupby

from engine.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), with the scalings that Llama checkpoints use.

    ``scaling`` is ``default``, ``linear`` (positions divided by ``factor``) or ``llama3`` (wavelengths
    above ``original_max_position / low_freq_factor`` divided by ``factor``, those below
    ``original_max_position / high_freq_factor`` kept, a blend between).
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer: pre-norm RMSNorm, rotary attention with grouped kv heads, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """One entry per layer: how many keys, its own included, a query sees; None is all. Empty is all None."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's own dtype; what it is served in is EngineConfig's to say."""
    tensor_parallel_size: int = 1
    """Devices that heads, feed-forward and vocabulary are split over (engine/models/sharding.py)."""

    @property
    def kv_replicas(self) -> int:
        """How many devices have the same kv head, each for its own part of the query heads, where there are too few."""
        return max(1, self.tensor_parallel_size // self.num_kv_heads)

    @property
    def stored_kv_heads(self) -> int:
        """kv heads on all devices together, replicas included."""
        return self.num_kv_heads * self.kv_replicas

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head of the same device."""
        return self.num_heads // self.stored_kv_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of logits: as many on every device, in whole blocks of the sampler."""
        return padded_vocab_size(self.vocab_size, self.tensor_parallel_size)

    @property
    def runs(self) -> tuple[int, ...]:
        """The layers in order, counted by how many alike follow each other: what one ``lax.scan`` can go through."""
        alike = groupby(self.window(layer) for layer in range(self.num_layers))
        return tuple(len(list(run)) for _, run in alike)

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, None where it sees everything."""
        return self.sliding_windows[layer] if self.sliding_windows else None
