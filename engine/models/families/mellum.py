"""Mellum 2: Qwen3-MoE with windows, ropes and experts by layer type."""

from dataclasses import replace

import msgspec

from engine.models.families.glm4_moe import FURTHER
from engine.models.families.qwen3_moe import QwenMoeFields
from engine.models.family import Family, decoder_spec, ropes_by_layer_type, sparse_layers, with_experts
from engine.models.spec import ModelSpec


class MellumFields(QwenMoeFields):
    """The family's own keys."""

    mlp_layer_types: list[str] | None = None


def mellum(fields: MellumFields) -> ModelSpec:
    """By default all layers have full attention and experts."""
    layers = fields.num_hidden_layers
    types = ["full_attention"] * layers if fields.layer_types is None else fields.layer_types
    sparse = ["sparse"] * layers if fields.mlp_layer_types is None else fields.mlp_layer_types
    fields = msgspec.structs.replace(fields, layer_types=types)
    ropes = ropes_by_layer_type(fields, full_theta=500_000.0, sliding_theta=10_000.0)
    model = decoder_spec(fields, qk_norm=True, ropes=ropes)
    model = with_experts(model, fields.experts, sparse_layers(sparse, layers))
    return replace(model, unserved=(("mtp.", FURTHER),))


FAMILY = Family(
    "mellum",
    "MellumForCausalLM",
    mellum,
    fields=MellumFields,
    defaults={
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "num_experts": 64,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False, "rope_scaling": None},
)
