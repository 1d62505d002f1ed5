"""MiMo-V2-Flash: values narrower than keys, sinks and twice the kv heads in windowed layers, GLM-4.5's experts alone."""

from dataclasses import replace
from typing import Any

import msgspec

from engine.models.families.glm4_moe import FURTHER, SigmoidMoeFields, sigmoid_router
from engine.models.family import Family, decoder_spec, ropes_by_layer_type, sparse_layers, with_experts
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, require, require_one_of
from engine.models.spec import BlockSpec, ModelSpec, Multipliers
from engine.models.weights.parameters import LAYER, tensors

SINKS = {"attention.sinks": tensors(f"{LAYER}self_attn.attention_sink_bias")}


class MiMoV2Fields(SigmoidMoeFields):
    """The family's own keys, with the defaults of transformers."""

    v_head_dim: Count = 128
    attention_value_scale: float | None = 0.707
    sliding_window_size: Count | None = None
    mlp_layer_types: list[str] | None = None
    # Published beside the others, and not read by transformers:
    hybrid_layer_pattern: Any = None
    moe_layer_freq: Any = None
    layernorm_epsilon: Any = None
    swa_num_attention_heads: Any = None
    swa_num_key_value_heads: Any = None
    swa_head_dim: Any = None
    swa_v_head_dim: Any = None


def mimo_v2_flash(fields: MiMoV2Fields) -> ModelSpec:
    """The first layer and every sixth have full attention, and all but the first have experts, unless listed."""
    layers = fields.num_hidden_layers
    if fields.sliding_window_size is not None:
        fields = msgspec.structs.replace(fields, sliding_window=fields.sliding_window_size + 1)
    if fields.layer_types is None:
        full = [layer == 0 or layer % 6 == 5 for layer in range(layers)]
        fields = msgspec.structs.replace(
            fields, layer_types=["full_attention" if kind else "sliding_attention" for kind in full]
        )
    sparse = sparse_layers(fields.mlp_layer_types or ["dense", *["sparse"] * (layers - 1)], layers)
    ropes = ropes_by_layer_type(fields, full_theta=5_000_000.0, sliding_theta=10_000.0, partial=True)
    model = decoder_spec(fields, output_bias=False, ropes=ropes)
    _refuse_others(fields, sparse)
    blocks = tuple(_with_narrow_values(block, fields) for block in model.blocks)
    experts = ExpertsSpec(
        fields.moe_intermediate_size,
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        sigmoid_router(fields),
        fields.activation,
    )
    model = with_experts(replace(model, blocks=blocks), experts, sparse)
    has_sinks = "sliding_attention" in (fields.layer_types or [])
    return replace(model, tensors=tuple(SINKS.items()) if has_sinks else (), unserved=(("model.mtp.", FURTHER),))


def _with_narrow_values(block: BlockSpec, fields: MiMoV2Fields) -> BlockSpec:
    mixer = replace(self_attention(block), value_dim=fields.v_head_dim)
    if mixer.scores.window:
        kv_heads = 2 * mixer.num_kv_heads
        require(
            mixer.num_heads % kv_heads == 0,
            f"{mixer.num_heads} heads are no multiple of {kv_heads}, twice num_key_value_heads",
        )
        mixer = replace(mixer, num_kv_heads=kv_heads, sinks=True)
    scale = fields.attention_value_scale
    return replace(block, mixer=mixer, multipliers=Multipliers(mixer_output=1.0 if scale is None else scale))


def _refuse_others(fields: MiMoV2Fields, sparse: list[int]) -> None:
    """Raises UnsupportedError for keys of published configs that say otherwise than those that are read."""
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    said = {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in fields.layer_types or []],
        "moe_layer_freq": [int(layer in sparse) for layer in range(fields.num_hidden_layers)],
        "layernorm_epsilon": fields.rms_norm_eps,
        "swa_num_attention_heads": fields.num_attention_heads,
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_head_dim": fields.head_dim,
        "swa_v_head_dim": fields.v_head_dim,
    }
    for key, value in said.items():
        require_one_of(key, getattr(fields, key), (value, None))


FAMILY = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    mimo_v2_flash,
    fields=MiMoV2Fields,
    defaults={
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
        "partial_rotary_factor": 0.334,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False, "rope_scaling": None, "rope_theta": None},
    supported={
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "add_swa_attention_sink_bias": (True, None),
        "add_full_attention_sink_bias": (False, None),
        "rope_theta": (5_000_000.0, None),
        "swa_rope_theta": (10_000.0, None),
        "partial_rotary_factor": (0.334, None),
    },
)
