"""A decoder as data: its blocks and scales. partition.py has its split over devices."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from jax import Array

from engine.models.head_specs import AssistantSpec, HeadSpec, MTPHeadSpec
from engine.models.layers.mixer import InPages, KeysAndValues, Latents, MixerSpec, State
from engine.models.layers.per_layer_input import PerLayerInputSpec
from engine.models.rope_spec import RopeSpec
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import TensorRule
from engine.models.weights.published.quantised_tensor import Format

if TYPE_CHECKING:
    from engine.models.step_context import StepContext


class FeedForward(Protocol):
    """The module of a feed-forward, an ``nnx.Module``: f[..., hidden] -> f[..., hidden]."""

    def __call__(self, x: Array, step: "StepContext") -> Array:
        """f[..., hidden] -> f[..., hidden], all-reduced if the model is split over devices."""


class FeedForwardSpec(Protocol):
    """One kind of feed-forward, in the file of its module. Hashable."""

    def indivisible(self, devices: int) -> str | None:
        """What so many devices cannot split evenly, in words, if there is such."""

    def scratch(self, hidden_size: int, devices: int) -> int:
        """An upper estimate of a token's float32 numbers on each of the devices, in a step."""

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
class Multipliers:
    """What a layer's parts are given, and what they give, is multiplied by it."""

    mixer_input: float = 1.0
    mixer_output: float = 1.0
    beside_input: float = 1.0
    beside_output: float = 1.0
    feed_forward_output: float = 1.0


@dataclass(frozen=True)
class BlockSpec:
    """One layer: a mixer, a feed-forward or both, each added to the residual stream."""

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: NormPlan = NormPlan.BEFORE
    residual_scale: float = 1.0
    """Attention and feed-forward are multiplied by it before they are added."""
    is_parallel: bool = False
    """Attention and feed-forward see the same input, and are added together."""
    parallel_norm: bool = False
    """They do, but the feed-forward's norm is its own (GPT-NeoX)."""
    output_scale: bool = False
    """The residual stream behind the layer is multiplied by a learned number."""
    feed_forward_norms: NormPlan | None = None
    """The norms of the feed-forward if they are not those of attention."""
    beside: MixerSpec | None = None
    """A second mixer, of the same input; what both give is added. One has pages, the other a state."""
    multipliers: Multipliers = Multipliers()

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """None, one or two."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


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
    centered_norms: bool = False
    """Norms subtract the mean first."""
    norm_scales: bool = True
    """Those of the residual stream have scales."""
    norm_bias: bool = False
    """Those of the residual stream, which subtract the mean, add a bias of their own last."""
    tied_embeddings: bool = False
    head_bias: bool = False
    """Logits have a bias, which is added before ``logit_scale``."""
    embedding_multiplier: float | None = None
    """Factor of embedded tokens, applied in the dtype of the activations."""
    position_offset: int | None = None
    """Embedded tokens have a learned vector of their position added: that of the first one is this row
    of a table, which has as many more as ``max_position``. None is no table."""
    logit_scale: float = 1.0
    """Logits are multiplied by it, before the cap."""
    logit_soft_cap: float | None = None
    """Logits become ``cap * tanh(logits / cap)``; None is no cap."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's dtype; EngineConfig decides the dtype in service."""
    tensors: tuple[tuple[str, TensorRule], ...] = ()
    """By a parameter's name, its tensors if they differ from the module's default."""
    unserved: tuple[tuple[str, str], ...] = ()
    """The parts of the checkpoint besides the text model: the prefix of their tensors, a name."""
    base_prefix: str | None = None
    """How the names of all tensors but the head's begin, unless the checkpoint is of the base model
    alone, where none begins so."""
    unused_tensors: str | None = None
    """Expression for names of tensors that published checkpoints have and no layer reads."""
    further_layers: tuple[MTPHeadSpec, ...] = ()
    """Layers of the checkpoint behind the last one, which predict further tokens (multi-token
    prediction). They are no part of the model."""
    published: Format | None = None
    """The quantised format of the checkpoint."""
    per_layer_inputs: PerLayerInputSpec | None = None
    """Every layer also sees an embedding of the token that is its own."""
    last_layers: tuple[tuple[str, int], ...] = ()
    """Of Gemma 4, by layer type the last layer with keys and values of its own, which an assistant
    reads."""
    head: HeadSpec | None = None
    """What makes it a draft head for another model."""
    keeps_all: bool = False
    """Whether pages keep all tokens also for layers with windows, so that all read one page table."""

    def __post_init__(self) -> None:
        if any(self.num_kv_heads % cached.kv_heads for cached in self._in_pages):
            raise ValueError(
                "all layers share one pool of pages: the most kv heads must be a multiple of every layer's"
            )
        if any(
            len({isinstance(mixer.cached, State) for mixer in block.mixers}) < len(block.mixers)
            for block in self.blocks
        ):
            raise ValueError("of two mixers of a layer, one must have pages and the other a state")
        if len({cached for mixer in self.mixers if isinstance(cached := mixer.cached, State)}) > 1:
            raise ValueError("all layers share one pool of slots: their states must have the same arrays")
        if len({cached.vectors for cached in self._in_pages}) > 1:
            raise ValueError("all layers share one pool of pages: either keys and values, or latents")

    @property
    def position_rows(self) -> int:
        """The rows of the table of positions; 0 without one."""
        return 0 if self.position_offset is None else self.position_offset + self.max_position

    @property
    def num_layers(self) -> int:
        """The layers of the model."""
        return len(self.blocks)

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Those of all layers, in order."""
        return tuple(mixer for block in self.blocks for mixer in block.mixers)

    @property
    def num_kv_heads(self) -> int:
        """The kv heads of a page, the most of any layer. A layer with fewer has each repeatedly."""
        return max(cached.kv_heads for cached in self._in_pages)

    @property
    def head_dim(self) -> int:
        """The head_dim of a page, the largest of any layer. Smaller heads are padded."""
        return max(cached.head_dim for cached in self._in_pages)

    @property
    def has_latents(self) -> bool:
        """Whether pages have latents, not keys and values."""
        return any(cached.vectors == 1 for cached in self._in_pages)

    @property
    def _in_pages(self) -> list[InPages]:
        every = (mixer.cached for mixer in self.mixers)
        own = [cached for cached in every if isinstance(cached, KeysAndValues | Latents)]
        return [*self.head.pages, *own] if isinstance(self.head, AssistantSpec) else own

    @property
    def reads_pages(self) -> bool:
        """Whether it has no pages of its own, and reads those of the model that it drafts for."""
        return isinstance(self.head, AssistantSpec)

    @property
    def feature_size(self) -> int:
        """Numbers of what a draft head reads of the token before (engine/speculation/feature_pages.py)."""
        return self.head.model_size if isinstance(self.head, AssistantSpec) else self.hidden_size

    @property
    def ropes(self) -> tuple[tuple[RopeSpec, int], ...]:
        """The different ropes of the layers with their head_dim; a step has a rotation for each."""
        each = (mixer.rotated for mixer in self.mixers)
        return tuple(dict.fromkeys(rotated for rotated in each if rotated is not None))

    @property
    def attention_extras(self) -> str | None:
        """What attention of some layer needs that not every kernel has, in words."""
        return next((extras for mixer in self.mixers if (extras := mixer.extras)), None)

    def mixer_scratch(self, devices: int) -> int:
        """The most ``scratch`` of any layer's mixers."""
        return max(sum(mixer.scratch(self.head_dim, devices) for mixer in block.mixers) for block in self.blocks)

    def feed_forward_scratch(self, devices: int) -> int:
        """The most ``scratch`` of any feed-forward."""
        each = (block.feed_forward for block in self.blocks)
        return max((feed.scratch(self.hidden_size, devices) for feed in each if feed is not None), default=0)


def single_layers(blocks: tuple[BlockSpec, ...]) -> tuple[LayerGroup, ...]:
    """Each layer as a group, where no ``lax.scan`` runs them."""
    return tuple(LayerGroup((block,), 1) for block in blocks)


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
