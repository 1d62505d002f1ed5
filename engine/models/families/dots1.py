"""dots.llm1: Qwen 3's attention, and GLM-4.5's experts."""

from engine.models.families.glm4_moe import SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, decoder_spec
from engine.models.spec import ModelSpec


def dots1(fields: SigmoidMoeFields) -> ModelSpec:
    """Layers from ``max_window_layers`` on slide, unless config.json lists the sliding layers."""
    return with_sigmoid_experts(decoder_spec(fields, qk_norm=True), fields)


FAMILY = Family(
    "dots1",
    "Dots1ForCausalLM",
    dots1,
    fields=SigmoidMoeFields,
    defaults={
        "num_key_value_heads": 32,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False},
)
