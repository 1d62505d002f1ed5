"""Hunyuan 3: Qwen3's attention, and GLM-4.5's experts."""

from dataclasses import replace

import msgspec

from engine.models.families.glm4_moe import FURTHER, SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, decoder_spec, sparse_layers
from engine.models.layers.experts import gated
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

RULES = {
    "mlp.router.kernel": tensors(f"{LAYER}mlp.router.gate.weight"),
    "mlp.router.correction": tensors(f"{LAYER}mlp.expert_bias"),
    **gated("mlp.shared", "mlp.shared_mlp"),
}


class HYV3Fields(SigmoidMoeFields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 192
    num_shared_experts: Count = 1
    router_scaling_factor: Positive = 2.826
    mlp_layer_types: list[str] | None = None


def hy_v3(fields: HYV3Fields) -> ModelSpec:
    """By default the first layer alone is dense."""
    fields = msgspec.structs.replace(
        fields,
        n_routed_experts=fields.num_experts,
        n_shared_experts=fields.num_shared_experts,
        routed_scaling_factor=fields.router_scaling_factor,
    )
    layers, types = fields.num_hidden_layers, fields.mlp_layer_types
    sparse = range(1, layers) if types is None else sparse_layers(types, layers)
    model = with_sigmoid_experts(decoder_spec(fields, qk_norm=True), fields, sparse, RULES)
    return replace(model, unserved=((f"model.layers.{layers}.", FURTHER),))


FAMILY = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    hy_v3,
    fields=HYV3Fields,
    defaults={
        "vocab_size": 120832,
        "hidden_size": 4096,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "moe_intermediate_size": 1536,
    },
    fixed={
        "use_sliding_window": False,
        "layer_types": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    supported={
        "mlp_bias": (False, None),
        "qk_norm": (True, None),
        "route_norm": (True, None),
        "first_k_dense_replace": (1, None),
    },
)
