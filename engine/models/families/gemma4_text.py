"""Gemma 4, dense or with experts: full layers have larger heads, late layers read the keys and values of earlier ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from caching.attention.spec import AttentionSpec
from engine.models.family import Family, Fields, decoder_spec, layer_pattern, rope_reader
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.experts import ExpertsSpec, gated, or_one_by_one, stacked
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.per_layer_input import PerLayerInputSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.requirements import Count, Positive, UnsupportedError, require, require_one_of
from engine.models.rope_fields import LAYER_TYPES
from engine.models.rope_spec import RopeSpec
from engine.models.spec import BlockSpec, ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

FULL, SLIDING = LAYER_TYPES
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


EXPERTS = {
    "mlp.router.kernel": tensors(f"{LAYER}router.proj.weight"),
    **or_one_by_one(stacked("experts.gate_up_proj", "experts.down_proj"), "experts."),
    **gated("mlp.shared", "mlp"),
}


class LayerFields(msgspec.Struct, forbid_unknown_fields=True):
    """What transformers 5 writes of a layer that differs from the others."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


class Gemma4Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    hidden_activation: str = "gelu_pytorch_tanh"
    final_logit_softcapping: Positive | None = None
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, LayerFields] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: Count = 262144
    enable_moe_block: bool = False
    num_experts: Count | None = None
    top_k_experts: Count | None = None
    moe_intermediate_size: Count | None = None


def gemma4(fields: Gemma4Fields) -> ModelSpec:
    """See ``gemma4_layers``; some layers may read the keys and values of earlier ones."""
    types, own = layer_types(fields), fields.num_hidden_layers - fields.num_kv_shared_layers
    require(own > 0, f"num_kv_shared_layers {fields.num_kv_shared_layers} leaves no layer with keys of its own")
    last = {layer_type: layer for layer, layer_type in enumerate(types[:own])}
    for layer_type in types[own:]:
        require(layer_type in last, f"no layer of {layer_type} has keys that the last layers could read")
    size = fields.hidden_size_per_layer_input
    if size:
        require_one_of("vocab_size_per_layer_input", fields.vocab_size_per_layer_input, (fields.vocab_size,))
    model = gemma4_layers(fields, [None] * own + [last[layer_type] for layer_type in types[own:]])
    activation = msgspec.structs.replace(fields, hidden_act=fields.hidden_activation).activation
    return replace(
        model,
        tensors=tuple(EXPERTS.items()) if fields.enable_moe_block else (),
        per_layer_inputs=PerLayerInputSpec(size, activation) if size else None,
        last_layers=tuple(last.items()),
    )


def layer_types(fields: Gemma4Fields) -> list[str]:
    """Of each layer. The last one is full, whatever config.json says."""
    return [*layer_pattern(fields, 6)[:-1], FULL]


def gemma4_layers(fields: Gemma4Fields, sources: Sequence[int | None]) -> ModelSpec:
    """A model whose layers read the keys and values of those in ``sources``; None is a layer's own."""
    types = layer_types(fields)
    fields = msgspec.structs.replace(fields, layer_types=types, hidden_act=fields.hidden_activation)
    model = decoder_spec(
        fields,
        norms=NormPlan.BOTH,
        ropes=[RopeSpec()] * len(types),
        embedding_multiplier=fields.hidden_size**0.5,
        logit_soft_cap=fields.final_logit_softcapping,
    )
    without = "|".join(str(layer) for layer, source in enumerate(sources) if source is not None) or "none"
    return replace(
        model,
        blocks=tuple(_blocks(fields, model, types, sources)),
        max_position=fields.max_position_embeddings,
        unused_tensors=rf"model\.layers\.({without})\.self_attn\.[kv]_.*",
    )


def _blocks(
    fields: Gemma4Fields, model: ModelSpec, types: Sequence[str], sources: Sequence[int | None]
) -> Iterator[BlockSpec]:
    """The blocks, with heads, ropes and sources by layer type."""
    for layer, (block, layer_type, source) in enumerate(zip(model.blocks, types, sources, strict=True)):
        columns = fields.intermediate_size * (2 if source is not None and fields.use_double_wide_mlp else 1)
        dense = GatedSpec(columns, activation=fields.activation)
        yield replace(
            block,
            mixer=replace(_mixer(fields, layer, layer_type), kv_source=source),
            feed_forward=_experts(fields, dense) if fields.enable_moe_block else dense,
            feed_forward_norms=NormPlan.AFTER if fields.enable_moe_block else None,
            output_scale=True,
        )


def _experts(fields: Gemma4Fields, shared: GatedSpec) -> ExpertsSpec:
    """The experts beside a layer's feed-forward, which counts as a shared one."""
    eps, sizes = fields.rms_norm_eps, (fields.moe_intermediate_size, fields.num_experts, fields.top_k_experts)
    columns, experts, chosen = sizes
    if columns is None or experts is None or chosen is None:
        raise UnsupportedError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size")
    router = RouterSpec(norm_eps=eps, expert_scale=True)
    return ExpertsSpec(columns, experts, chosen, router, shared.activation, shared=shared, branch_norm_eps=eps)


def _mixer(fields: Gemma4Fields, layer: int, layer_type: str) -> SelfAttentionSpec:
    is_full = layer_type == FULL
    own = _own_sizes(fields, layer, layer_type)
    head_dim = own.head_dim or fields.size_of_head
    kv_heads = own.num_key_value_heads or fields.num_key_value_heads or fields.num_attention_heads
    given: Any = (fields.rope_parameters or ROPES).get(layer_type)
    require(isinstance(given, dict), f"rope_parameters has no {layer_type} that is an object")
    reader = replace(rope_reader(fields), head_dim=head_dim)
    return SelfAttentionSpec(
        fields.num_attention_heads,
        kv_heads,
        head_dim,
        AttentionSpec(1.0, None if is_full else fields.sliding_window),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        qk_norm=True,
        rope=reader.read(given, ROPES[layer_type]["rope_theta"]),
        value_norm=True,
        keys_are_values=is_full and fields.attention_k_eq_v,
    )


def _own_sizes(fields: Gemma4Fields, layer: int, layer_type: str) -> LayerFields:
    """Those of full layers, unless config.json has them layer by layer."""
    if fields.per_layer_config is not None:
        sizes = {key.lstrip("0") or "0": own for key, own in fields.per_layer_config.items()}  # "05" beside "10"
        return sizes.get(str(layer)) or LayerFields()
    if layer_type != FULL:
        return LayerFields()
    return LayerFields(fields.global_head_dim, fields.num_global_key_value_heads if fields.attention_k_eq_v else None)


DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
FIXED = {"use_sliding_window": True, "mlp_bias": False}
SUPPORTED = {"use_bidirectional_attention": (None, "vision")}
FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    gemma4,
    fields=Gemma4Fields,
    defaults=DEFAULTS,
    fixed=FIXED,
    supported=SUPPORTED,
)
