"""OLMoE: one norm for all query heads, one for all keys, and experts in all layers."""

from engine.models.family import Family, Fields, decoder_spec, with_experts
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.experts import ExpertsSpec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec, NormPlan


class OlmoeFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False


def olmoe(fields: OlmoeFields, norms: NormPlan = NormPlan.BEFORE) -> ModelSpec:
    """All layers have the same experts."""
    router = RouterSpec(normalised=fields.norm_topk_prob)
    sizes = fields.intermediate_size, fields.num_experts, fields.num_experts_per_tok
    experts = ExpertsSpec(*sizes, router, fields.activation)
    model = decoder_spec(fields, joint_qk_norm=True, norms=norms)
    return with_experts(model, experts, range(fields.num_hidden_layers))


FIXED = {"use_sliding_window": False, "layer_types": None, "mlp_bias": False}

FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    olmoe,
    fields=OlmoeFields,
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    fixed={**FIXED, "head_dim": None},
    supported={"clip_qkv": (None,)},
)
