"""LFM2 with experts behind the first layers, chosen by sigmoids."""

from dataclasses import replace

from engine.models.families.lfm2 import (
    ATTENTION_TENSORS,
    DEFAULTS,
    DENSE_TENSORS,
    FEED_FORWARD,
    FIXED,
    TENSORS,
    TiedFields,
    convolution_model,
)
from engine.models.family import Family, with_experts
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, one_by_one
from engine.models.requirements import Count, Positive, require
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import tensors

EXPERTS_TENSORS = {
    "mlp.router.kernel": tensors(f"{FEED_FORWARD}gate.weight"),
    **one_by_one("feed_forward.experts.", "w1", "w3", "w2"),
}
CORRECTION = {"mlp.router.correction": tensors(f"{FEED_FORWARD}expert_bias")}


class Lfm2MoeFields(TiedFields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 32
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1792
    num_dense_layers: int = 2
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0


def lfm2_moe(fields: Lfm2MoeFields) -> ModelSpec:
    """Raises UnsupportedError."""
    require(fields.layer_types is not None, "lfm2_moe needs layer_types")
    model = convolution_model(fields, fields.layer_types or (), fields.intermediate_size)
    sparse = range(max(0, fields.num_dense_layers), fields.num_hidden_layers)
    router = RouterSpec(
        Scoring.SIGMOID,
        fields.norm_topk_prob,
        fields.routed_scaling_factor,
        correction=fields.use_expert_bias,
        least_sum=1e-6,
    )
    experts = ExpertsSpec(fields.moe_intermediate_size, fields.num_experts, fields.num_experts_per_tok, router)
    rules = DENSE_TENSORS if len(sparse) < fields.num_hidden_layers else {}
    if sparse:
        rules = rules | EXPERTS_TENSORS | (CORRECTION if fields.use_expert_bias else {})
    return replace(with_experts(model, experts, sparse), tensors=tuple(rules.items()))


FAMILY = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    lfm2_moe,
    fields=Lfm2MoeFields,
    defaults={**DEFAULTS, "hidden_size": 2048, "intermediate_size": 7168},
    fixed=FIXED,
    tensors=TENSORS | ATTENTION_TENSORS,
)
