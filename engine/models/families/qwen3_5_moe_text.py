"""Qwen 3.5 with experts in all layers, and a shared expert behind a gate of its own."""

from engine.models.families.qwen3_5_text import qwen3_5
from engine.models.families.qwen3_next import DEFAULTS, FIXED, SCALES, Qwen3NextFields
from engine.models.family import Family, with_experts
from engine.models.layers.experts import or_one_by_one, stacked
from engine.models.spec import ModelSpec


def qwen3_5_moe(fields: Qwen3NextFields) -> ModelSpec:
    """The weights of the chosen experts are divided by their sum."""
    experts = fields.experts_beside(fields.shared_expert_intermediate_size)
    return with_experts(qwen3_5(fields), experts, range(fields.num_hidden_layers))


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    qwen3_5_moe,
    fields=Qwen3NextFields,
    defaults={
        **DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "max_position_embeddings": 32768,
    },
    fixed={**FIXED, "norm_topk_prob": True, "intermediate_size": 1},
    tensors=SCALES | or_one_by_one(stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "mlp.experts."),
)
