"""A decoder as data: its blocks and scales. partition.py has its split over devices."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from jax import Array

from caching.attention.spec import AttentionSpec
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import TensorRule


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), with the scalings that Llama checkpoints use.

    ``scaling`` is ``default``, ``linear`` (positions divided by ``factor``) or ``llama3``
    (wavelengths above ``original_max_position / low_freq_factor`` divided by ``factor``, those
    below ``original_max_position / high_freq_factor`` unchanged, blended between).
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class SelfAttentionSpec:
    """Rotary self-attention with grouped kv heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scores: AttentionSpec
    """The scale, window and soft cap of this layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Each query and key head goes through an RMSNorm before it is rotated."""

    @property
    def cached(self) -> tuple[int, int]:
        """The kv heads and head_dim that the cache has for each token."""
        return self.num_kv_heads, self.head_dim


class FeedForward(Protocol):
    """The module of a feed-forward, an ``nnx.Module``: f[..., hidden] -> f[..., hidden]."""

    def __call__(self, x: Array) -> Array:
        """f[..., hidden] -> f[..., hidden], all-reduced if the model is split over devices."""


class FeedForwardSpec(Protocol):
    """One kind of feed-forward, in the file of its module. Hashable."""

    @property
    def intermediate_size(self) -> int:
        """The columns that several devices split."""

    @property
    def width(self) -> int:
        """Inputs of its last product a token, on all devices; a step needs memory for them."""

    def build(self, hidden_size: int, make: ParameterFactory) -> FeedForward:
        """Its module, with parameters from ``make``."""


class NormPlan(Enum):
    """RMSNorms before attention and feed-forward, after them, or both."""

    BEFORE = auto()
    AFTER = auto()
    BOTH = auto()

    @property
    def before(self) -> bool:
        """Whether the input is normed."""
        return self is not NormPlan.AFTER

    @property
    def after(self) -> bool:
        """Whether the output is normed, before it is added to the residual stream."""
        return self is not NormPlan.BEFORE


@dataclass(frozen=True)
class BlockSpec:
    """One layer: a mixer and a feed-forward, each added to the residual stream."""

    mixer: SelfAttentionSpec
    feed_forward: FeedForwardSpec
    norms: NormPlan = NormPlan.BEFORE


@dataclass(frozen=True)
class LayerGroup:
    """Layers that repeat: ``repeats`` times the blocks of ``period``, one after the other."""

    period: tuple[BlockSpec, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """The layers of all repeats together."""
        return len(self.period) * self.repeats


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeSpec = RopeSpec()
    tied_embeddings: bool = False
    embedding_multiplier: float | None = None
    """Factor of embedded tokens, applied in the dtype of the activations."""
    logit_soft_cap: float | None = None
    """Logits become ``cap * tanh(logits / cap)``; None is no cap."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's dtype; EngineConfig decides the dtype in service."""
    tensors: tuple[tuple[str, TensorRule], ...] = ()
    """By a parameter's name, its tensors if they differ from the module's default."""

    def __post_init__(self) -> None:
        if len({block.mixer.cached for block in self.blocks}) != 1:
            raise ValueError("all layers share one pool of pages: their kv heads and head_dim must be the same")

    @property
    def num_layers(self) -> int:
        """The layers of the model."""
        return len(self.blocks)

    @property
    def attention(self) -> SelfAttentionSpec:
        """The first layer's attention; the other layers have the same numbers of heads."""
        return self.blocks[0].mixer

    @property
    def feed_forward_width(self) -> int:
        """The ``width`` of the widest feed-forward."""
        return max(block.feed_forward.width for block in self.blocks)


def layer_plan(blocks: tuple[BlockSpec, ...]) -> tuple[LayerGroup, ...]:
    """The layers in order, in groups for one ``lax.scan`` each: the longest repeats of a period.

    Eleven times five windowed layers and a full one are one group with a period of six.
    """
    groups, start = [], 0
    while start < len(blocks):
        group = max(
            (_group(blocks[start:], length) for length in range(1, (len(blocks) - start) // 2 + 1)),
            key=lambda group: (group.num_layers if group.repeats > 1 else 1, -len(group.period)),
            default=LayerGroup(blocks[start : start + 1], 1),
        )
        if group.repeats == 1:
            group = LayerGroup(blocks[start : start + 1], 1)
        groups.append(group)
        start += group.num_layers
    return tuple(groups)


def _group(blocks: tuple[BlockSpec, ...], length: int) -> LayerGroup:
    """The first ``length`` blocks and how often they repeat."""
    period, repeats = blocks[:length], 1
    while blocks[repeats * length : (repeats + 1) * length] == period:
        repeats += 1
    return LayerGroup(period, repeats)
