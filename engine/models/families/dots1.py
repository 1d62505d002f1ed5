"""dots.llm1: Qwen 3's attention, and GLM-4.5's experts."""

from engine.models.families.glm4_moe import SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, decoder_spec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec


class Dots1Fields(SigmoidMoeFields, kw_only=True):
    """The keys that have no default in transformers."""

    n_routed_experts: Count
    n_shared_experts: Count
    num_experts_per_tok: Count


def dots1(fields: Dots1Fields) -> ModelSpec:
    """Layers from ``max_window_layers`` on slide, unless config.json lists the sliding layers."""
    return with_sigmoid_experts(decoder_spec(fields, qk_norm=True), fields)


FAMILY = Family(
    "dots1",
    "Dots1ForCausalLM",
    dots1,
    fields=Dots1Fields,
    defaults={
        "num_key_value_heads": 32,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False},
)
