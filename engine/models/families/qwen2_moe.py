"""Qwen 1.5 and 2 with experts, and a shared expert behind a gate of its own."""

import msgspec

from engine.models.families.qwen3_moe import QwenMoeFields
from engine.models.family import Family, decoder_spec, with_experts
from engine.models.requirements import Count
from engine.models.spec import ModelSpec


class Qwen2MoeFields(QwenMoeFields):
    """The family's own keys, with the defaults of transformers."""

    sliding_window: int | None = 4096
    """transformers 5 writes 0 where none is in use."""
    shared_expert_intermediate_size: Count = 5632
    qkv_bias: bool = True


def qwen2_moe(fields: Qwen2MoeFields) -> ModelSpec:
    """If a window is in use, every second layer before ``max_window_layers`` slides."""
    if fields.layer_types is None and fields.use_sliding_window and fields.sliding_window:
        slides = [layer % 2 == 0 and layer < fields.max_window_layers for layer in range(fields.num_hidden_layers)]
        types = ["sliding_attention" if layer else "full_attention" for layer in slides]
        fields = msgspec.structs.replace(fields, layer_types=types)
    model = decoder_spec(fields, qkv_bias=fields.qkv_bias)
    experts = fields.experts_beside(fields.shared_expert_intermediate_size)
    return with_experts(model, experts, fields.sparse_layers)


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    qwen2_moe,
    fields=Qwen2MoeFields,
    defaults={"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    fixed={"attention_bias": False, "mlp_bias": False},
)
