"""Family, the content of a file in engine/models/families, and the config.json keys of most.

Keys mean what they mean in transformers 5. Its version 4 spellings are read too: ``rope_theta``
and ``rope_scaling`` for ``rope_parameters``, ``torch_dtype`` for ``dtype``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from caching.attention.spec import AttentionSpec
from engine.models.feed_forward import GatedSpec
from engine.models.spec import BlockSpec, FeedForwardSpec, ModelSpec, NormPlan, RopeSpec, SelfAttentionSpec
from engine.models.weights.parameters import TensorRule

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]

DTYPES = (None, "float32", "float16", "bfloat16")
SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu", "swish"),
        "quantization_config": (None,),
        "compression_config": (None,),
        "partial_rotary_factor": (1, None),
        "dtype": DTYPES,
        "torch_dtype": DTYPES,
    }
)
"""The supported values of keys that could change the architecture, the default first."""

_ROPE_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
)
"""The supported rope types, and the keys that each requires; RopeSpec's have the same names."""

LAYER_TYPES = ("full_attention", "sliding_attention")


class UnsupportedError(Exception):
    """No decoder supports this; ``read_model_config`` adds the file's name."""


class _Rope(msgspec.Struct):
    """``rope_parameters`` or ``rope_scaling``; ``type`` is the oldest name of ``rope_type``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None
    full_attention: Any = None
    sliding_attention: Any = None


class Fields(msgspec.Struct):
    """The architecture's keys of ``config.json``, with the defaults of most families.

    A family with keys of its own has a subclass.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


@dataclass(frozen=True)
class Family:
    """One ``model_type``: a ModelSpec from its config.json, and the names of its tensors."""

    model_type: str
    architecture: str
    spec: Callable[[Any], ModelSpec]
    """From ``fields``; mostly a call of ``decoder_spec`` with the differences."""
    fields: type[Fields] = Fields
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of transformers for keys that config.json lacks."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that the family's code in transformers uses whatever config.json has."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Like SUPPORTED_VALUES, and overrides it for keys in both."""
    tensors: Mapping[str, TensorRule] = field(default_factory=dict)
    """By a parameter's name, its tensors if they differ from the module's default."""


def require(holds: bool, message: str) -> None:
    """Raises UnsupportedError."""
    if not holds:
        raise UnsupportedError(message)


def require_one_of(key: str, value: object, supported: tuple[Any, ...]) -> None:
    """Raises UnsupportedError naming what is supported."""
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
    named = ", ".join(str(other) for other in supported if other is not None) or "none"
    require(value in supported, f"{key} {shown} is not supported; supported: {named}")


def decoder_spec(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    attention_scale: float | None = None,
    attention_soft_cap: float | None = None,
    feed_forward: FeedForwardSpec | None = None,
    norms: NormPlan = NormPlan.BEFORE,
    embedding_multiplier: float | None = None,
    logit_soft_cap: float | None = None,
) -> ModelSpec:
    """A decoder of blocks that differ only in their windows; ``feed_forward`` defaults to SiLU."""
    heads, hidden = fields.num_attention_heads, fields.hidden_size
    kv_heads = fields.num_key_value_heads or heads
    require(heads % kv_heads == 0, f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    require(
        fields.head_dim is not None or hidden % heads == 0,
        f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim",
    )
    head_dim = fields.head_dim or hidden // heads
    require(head_dim % 2 == 0, f"head_dim {head_dim} must be even for rotary embedding")
    scale, rope = attention_scale or head_dim**-0.5, _rope(fields)

    def block(window: int | None) -> BlockSpec:
        scores = AttentionSpec(scale, window, attention_soft_cap)
        mixer = SelfAttentionSpec(
            heads, kv_heads, head_dim, scores, qkv_bias or fields.attention_bias, fields.attention_bias, qk_norm
        )
        return BlockSpec(mixer, feed_forward or GatedSpec(fields.intermediate_size, fields.mlp_bias), norms)

    return ModelSpec(
        vocab_size=fields.vocab_size,
        hidden_size=hidden,
        blocks=tuple(map(block, _windows(fields))),
        max_position=_max_position(fields, rope),
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        tied_embeddings=fields.tie_word_embeddings,
        embedding_multiplier=embedding_multiplier,
        logit_soft_cap=logit_soft_cap,
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )


def _rope(fields: Fields) -> RopeSpec:
    rope = fields.rope_scaling or fields.rope_parameters or _Rope()
    require(
        rope.full_attention is None and rope.sliding_attention is None,
        "rope parameters that differ by layer type are not supported; supported is one set for all layers",
    )
    partial = rope.partial_rotary_factor
    require_one_of("partial_rotary_factor", partial, SUPPORTED_VALUES["partial_rotary_factor"])
    scaling = rope.rope_type or rope.type or "default"
    require_one_of("rope type", scaling, tuple(_ROPE_KEYS))
    values = {key: getattr(rope, key) for key in _ROPE_KEYS[scaling]}
    for key, value in values.items():
        require(value is not None, f"rope type {scaling!r} needs {key}")
    if scaling == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        require(low < high, f"low_freq_factor {low} must be below high_freq_factor {high}")
        values["original_max_position"] = (
            fields.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or fields.max_position_embeddings
        )
    return RopeSpec(theta=rope.rope_theta or fields.rope_theta or 10_000.0, scaling=scaling, **values)


def _max_position(fields: Fields, rope: RopeSpec) -> int:
    """The context length in tokens; linear scaling multiplies ``max_position_embeddings``."""
    stretch = rope.factor if rope.scaling == "linear" else 1.0
    return int(fields.max_position_embeddings * stretch)


def _windows(fields: Fields) -> list[int | None]:
    """The sliding window of each layer in tokens; None is full attention."""
    layers = fields.num_hidden_layers
    if fields.layer_types is None:
        slides = [layer >= fields.max_window_layers for layer in range(layers)]
    else:
        for layer_type in fields.layer_types:
            require_one_of("layer_types", layer_type, LAYER_TYPES)
        slides = [layer_type == "sliding_attention" for layer_type in fields.layer_types]
        require(len(slides) == layers, f"layer_types has {len(slides)} entries for {layers} layers")
    window = fields.sliding_window if fields.use_sliding_window else None
    require(
        window is not None or fields.layer_types is None or not any(slides),
        "layer_types asks for sliding_attention, but no sliding window is in use",
    )
    return [window if layer else None for layer in slides]
