"""AFMoE (Trinity): gated attention with rope in windowed layers alone, norms on both sides, and GLM-4.5's experts."""

import msgspec

from engine.models.families.glm4_moe import SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, decoder_spec, layer_pattern, uniform_rope, with_attention
from engine.models.requirements import Count, Positive
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

ROUTER = {
    "mlp.router.kernel": tensors(f"{LAYER}mlp.router.gate.weight"),
    "mlp.router.correction": tensors(f"{LAYER}mlp.expert_bias"),
}
ONE_GROUP = (1, None)


class AfmoeFields(SigmoidMoeFields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 64
    num_shared_experts: Count = 2
    num_dense_layers: int = 1
    route_scale: Positive = 1.0
    global_attn_every_n_layers: Count = 4
    mup_enabled: bool = False


def afmoe(fields: AfmoeFields) -> ModelSpec:
    """Layers of full attention have no rope, whether others have a window or not."""
    types = layer_pattern(fields, fields.global_attn_every_n_layers)
    fields = msgspec.structs.replace(
        fields,
        layer_types=types,
        n_routed_experts=fields.num_experts,
        n_shared_experts=fields.num_shared_experts,
        first_k_dense_replace=fields.num_dense_layers,
        routed_scaling_factor=fields.route_scale,
    )
    rope = uniform_rope(fields)
    model = decoder_spec(
        fields,
        qk_norm=True,
        norms=NormPlan.BOTH,
        ropes=[NO_ROPE if kind == "full_attention" else rope for kind in types],
        embedding_multiplier=fields.hidden_size**0.5 if fields.mup_enabled else None,
    )
    return with_sigmoid_experts(with_attention(model, gate_proj=True), fields, rules=ROUTER)


FAMILY = Family(
    "afmoe",
    "AfmoeForCausalLM",
    afmoe,
    fields=AfmoeFields,
    defaults={
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
        "num_experts_per_tok": 6,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False, "norm_topk_prob": True},
    supported={
        "score_func": ("sigmoid", None),
        "route_norm": (True, None),
        "n_group": ONE_GROUP,
        "topk_group": ONE_GROUP,
        "num_expert_groups": ONE_GROUP,
        "num_limited_groups": ONE_GROUP,
    },
    tensors={
        "mlp_norm.scale": tensors(f"{LAYER}pre_mlp_layernorm.weight"),
        "mlp_post_norm.scale": tensors(f"{LAYER}post_mlp_layernorm.weight"),
    },
)
