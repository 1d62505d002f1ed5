"""The text model of Qwen3-VL with experts: Qwen 3's, which are stored in two ways."""

from dataclasses import replace

from engine.models.families.qwen3_moe import QwenMoeFields, qwen3_moe
from engine.models.family import Family
from engine.models.layers.experts import or_else, or_one_by_one, stacked
from engine.models.spec import ModelSpec

NAMES = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
PUBLISHED = stacked(*NAMES, stored="experts hidden (gate_up ffn)", down_stored="experts ffn hidden")
RULES = or_else(stacked(*NAMES), or_one_by_one(PUBLISHED, "mlp.experts."))
"""Transformers 5 saves experts the other way round, under the same names, and reads both."""


def qwen3_vl_moe(fields: QwenMoeFields) -> ModelSpec:
    """The rope is plain, as the three positions of a token of text are one."""
    return replace(qwen3_moe(fields), tensors=tuple(RULES.items()) if fields.sparse_layers else ())


FAMILY = Family(
    "qwen3_vl_moe_text",
    "Qwen3VLMoeForConditionalGeneration",
    qwen3_vl_moe,
    fields=QwenMoeFields,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False, "norm_topk_prob": True},
)
