"""Family, the content of a file in engine/models/families, and the config.json keys of most."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec

from caching.attention.spec import AttentionSpec
from engine.models.layers.activation import ACTIVATIONS, Activation
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.mixer import MixerSpec
from engine.models.layers.self_attention import SelfAttentionSpec, self_attention
from engine.models.requirements import Count, Layers, Positive, require, require_one_of, without_nulls
from engine.models.rope_fields import LAYER_TYPES, RopeReader, Share, context_length
from engine.models.rope_spec import RopeSpec
from engine.models.spec import BlockSpec, FeedForwardSpec, ModelSpec, NormPlan
from engine.models.weights.parameters import TensorRule

DTYPES = (None, "float32", "float16", "bfloat16")
SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "dtype": DTYPES,
        "torch_dtype": DTYPES,
    }
)
"""The supported values of keys that could change the architecture, the default first."""
LINEAR, FULL = ("linear_attention", "mamba"), ("full_attention", "attention")
"""The ``layer_types`` of models with states, as transformers 5 and 4 write them."""


class Fields(msgspec.Struct):
    """The architecture's keys of ``config.json``, with the defaults of most families.

    A family with keys of its own has a subclass.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Share | None = None
    original_max_position_embeddings: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def size_of_head(self) -> int:
        """``head_dim``, or what follows from the other sizes. Raises UnsupportedError."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        require(
            self.head_dim is not None or hidden % heads == 0,
            f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim",
        )
        size = self.head_dim or hidden // heads
        require(size % 2 == 0, f"head_dim {size} must be even for rotary embedding")
        return size

    @property
    def activation(self) -> Activation:
        """``hidden_act``. Raises UnsupportedError."""
        require_one_of("hidden_act", self.hidden_act, tuple(ACTIVATIONS))
        return ACTIVATIONS[self.hidden_act]


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
    """By a parameter's name, its tensors if they differ from the module's default.

    ``ModelSpec.tensors`` has those of parameters that not every config of the family has.
    """
    aliases: tuple[str, ...] = ()
    """Other names of the architecture that config.json may have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """By a key of its config.json, the one of ``fields`` that it is another name of."""

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with what the family assumes. Raises UnsupportedError."""
        for key, name in self.names.items():
            same = key not in given or given.get(name, given[key]) == given[key]
            require(same, f"{key} and {name} are two names of one key, and differ: leave one of them out")
        given = without_nulls({self.names.get(key, key): value for key, value in given.items()}, self.fields)
        for key, supported in {**SUPPORTED_VALUES, **self.supported}.items():
            require_one_of(key, given.get(key, supported[0]), supported)
        return {**self.defaults, **given, **self.fixed}


@dataclass(frozen=True)
class Wrapper:
    """One ``model_type`` with other parts around a text model; the text alone is served."""

    model_type: str
    architecture: str
    text: str
    """The ``model_type`` of a ``text_config`` that names none."""
    parts: Mapping[str, str]
    """What is not served, by the prefix of its tensors."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that its code in transformers uses whatever ``text_config`` has."""
    is_flat: bool = False
    """Without a ``text_config`` the text model's keys are beside those of other parts."""


def decoder_spec(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    output_bias: bool | None = None,
    qk_norm: bool = False,
    joint_qk_norm: bool = False,
    attention_scale: float | None = None,
    attention_soft_cap: float | None = None,
    feed_forward: FeedForwardSpec | None = None,
    norms: NormPlan = NormPlan.BEFORE,
    ropes: Sequence[RopeSpec] | None = None,
    embedding_multiplier: float | None = None,
    residual_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_soft_cap: float | None = None,
    sinks: bool = False,
) -> ModelSpec:
    """A decoder of blocks that differ only in their windows and ropes.

    By default ``output_bias`` is config.json's ``attention_bias``, ``feed_forward`` is a GatedSpec
    with the activation ``hidden_act`` and ``ropes`` are the same for all layers.
    """
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    require(heads % kv_heads == 0, f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    head_dim = fields.size_of_head
    gated = GatedSpec(fields.intermediate_size, fields.mlp_bias, fields.activation)
    layers = fields.num_hidden_layers

    def block(window: int | None, rope: RopeSpec) -> BlockSpec:
        mixer = SelfAttentionSpec(
            heads,
            kv_heads,
            head_dim,
            AttentionSpec(attention_scale or head_dim**-0.5, window, attention_soft_cap),
            qkv_bias or fields.attention_bias,
            fields.attention_bias if output_bias is None else output_bias,
            qk_norm,
            joint_qk_norm,
            rope,
            sinks,
        )
        return BlockSpec(mixer, feed_forward or gated, norms, residual_scale)

    each = tuple(ropes or [uniform_rope(fields)] * layers)
    return ModelSpec(
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        blocks=tuple(map(block, _windows(fields), each)),
        max_position=context_length(fields.max_position_embeddings, each),
        rms_norm_eps=fields.rms_norm_eps,
        tied_embeddings=fields.tie_word_embeddings,
        embedding_multiplier=embedding_multiplier,
        logit_scale=logit_scale,
        logit_soft_cap=logit_soft_cap,
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )


def with_experts(model: ModelSpec, experts: FeedForwardSpec, layers: Collection[int]) -> ModelSpec:
    """The model with these experts as the feed-forward of some layers."""
    blocks = enumerate(model.blocks)
    return replace(
        model, blocks=tuple(replace(block, feed_forward=experts) if n in layers else block for n, block in blocks)
    )


def with_attention(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with these fields of the self-attention of all layers changed."""
    blocks = (replace(block, mixer=replace(self_attention(block), **changes)) for block in model.blocks)
    return replace(model, blocks=tuple(blocks))


def with_mixers(model: ModelSpec, mixer: MixerSpec, layers: Collection[int]) -> ModelSpec:
    """The model with this mixer in some layers. Raises UnsupportedError if none keeps its attention."""
    require(len(layers) < model.num_layers, "a model without any layer of full attention is not supported")
    blocks = enumerate(model.blocks)
    return replace(model, blocks=tuple(replace(block, mixer=mixer) if n in layers else block for n, block in blocks))


def check_types(types: Sequence[str], supported: tuple[str, ...], num_layers: int, key: str = "layer_types") -> None:
    """Raises UnsupportedError unless each layer has a supported type."""
    for layer_type in types:
        require_one_of(key, layer_type, supported)
    require(len(types) == num_layers, f"{key} has {len(types)} entries for {num_layers} layers")


def linear_layers(layer_types: Sequence[str], num_layers: int) -> list[int]:
    """The layers of linear attention, by the names of transformers 5 or 4. Raises UnsupportedError."""
    check_types(layer_types, (*LINEAR, *FULL), num_layers)
    return [layer for layer, layer_type in enumerate(layer_types) if layer_type in LINEAR]


def sparse_layers(types: Sequence[str], num_layers: int) -> list[int]:
    """The layers with experts, by ``mlp_layer_types``. Raises UnsupportedError."""
    check_types(types, ("dense", "sparse"), num_layers, "mlp_layer_types")
    return [layer for layer, kind in enumerate(types) if kind == "sparse"]


def rope_reader(fields: Fields, *, partial: bool = False, scales_queries: bool = False) -> RopeReader:
    """The reader of a model's rope parameters; the flags are RopeReader's."""
    return RopeReader(
        fields.size_of_head,
        fields.max_position_embeddings,
        fields.original_max_position_embeddings,
        fields.partial_rotary_factor,
        partial,
        scales_queries,
    )


def uniform_rope(fields: Fields, *, partial: bool = False, unless_given: Mapping[str, Any] | None = None) -> RopeSpec:
    """The rope of all layers. ``unless_given`` are the parameters of a config.json without any."""
    own = unless_given if fields.rope_parameters is None else fields.rope_parameters
    given = fields.rope_scaling or own or {}
    require(
        not set(LAYER_TYPES) & set(given),
        "rope parameters that differ by layer type are not supported; supported is one set for all layers",
    )
    return rope_reader(fields, partial=partial).read(given, fields.rope_theta or 10_000.0)


def ropes_by_layer_type(
    fields: Fields, *, full_theta: float, sliding_theta: float, partial: bool = False
) -> list[RopeSpec]:
    """The rope of each layer by ``layer_types``, as Gemma 3 and OLMo 3 have it.

    ``rope_scaling`` is for the layers of full attention alone. The thetas are for parameters
    without ``rope_theta``.
    """
    types, given = fields.layer_types or [], fields.rope_parameters or {}
    for key, value in given.items():
        require(key in LAYER_TYPES, f"rope_parameters has {key}; supported are {' and '.join(LAYER_TYPES)} in it")
        require(not value or isinstance(value, dict), f"rope_parameters has a {key} that is not an object")
    full, sliding = ({**(given.get(name) or {})} for name in LAYER_TYPES)
    full |= fields.rope_scaling or {}
    reader = rope_reader(fields, partial=partial)
    ropes = {LAYER_TYPES[0]: reader.read(full, full_theta), LAYER_TYPES[1]: reader.read(sliding, sliding_theta)}
    for layer_type in types:
        require_one_of("layer_types", layer_type, LAYER_TYPES)
    return [ropes[layer_type] for layer_type in types]


def layer_pattern(fields: Fields, period: int) -> list[str]:
    """``layer_types``; by default each layer slides but for the last of a period."""
    if fields.layer_types is not None:
        return fields.layer_types
    layers = range(1, fields.num_hidden_layers + 1)
    return ["sliding_attention" if layer % period else "full_attention" for layer in layers]


def _windows(fields: Fields) -> list[int | None]:
    """The sliding window of each layer in tokens; None is full attention."""
    layers = fields.num_hidden_layers
    if fields.layer_types is None:
        slides = [layer >= fields.max_window_layers for layer in range(layers)]
    else:
        check_types(fields.layer_types, LAYER_TYPES, layers)
        slides = [layer_type == "sliding_attention" for layer_type in fields.layer_types]
    window = fields.sliding_window if fields.use_sliding_window else None
    require(
        window is not None or fields.layer_types is None or not any(slides),
        "layer_types asks for sliding_attention, but no sliding window is in use",
    )
    return [window if layer else None for layer in slides]
