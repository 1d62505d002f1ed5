"""Granite 3 with experts: Granite's multipliers, and a softmax over the chosen experts."""

from dataclasses import replace

from engine.models.families.granite import GraniteFields, granite
from engine.models.family import Family, with_experts
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, or_one_by_one, stacked
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

MOE, SHARED = "block_sparse_moe.", f"{LAYER}shared_mlp."
TENSORS = {
    "mlp.router.kernel": tensors(f"{LAYER}{MOE}router.layer.weight"),
    **or_one_by_one(stacked(f"{MOE}input_linear.weight", f"{MOE}output_linear.weight"), f"{MOE}experts."),
}
SHARED_TENSORS = {
    "mlp.shared.gate_up_kernel": tensors(*[f"{SHARED}input_linear.weight"] * 2, along="gate_up"),
    "mlp.shared.down_kernel": tensors(f"{SHARED}output_linear.weight"),
}


class GraniteMoeFields(GraniteFields):
    """The family's own keys, with the defaults of transformers."""

    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    shared_intermediate_size: int = 0


def granite_moe(fields: GraniteMoeFields) -> ModelSpec:
    """All layers have the same experts, and a shared one if it has a size."""
    size, activation = fields.shared_intermediate_size, fields.activation
    experts = ExpertsSpec(
        fields.intermediate_size,
        fields.num_local_experts,
        fields.num_experts_per_tok,
        RouterSpec(Scoring.SOFTMAX_OF_CHOSEN),
        activation,
        shared=GatedSpec(size, activation=activation) if size else None,
    )
    model = with_experts(granite(fields), experts, range(fields.num_hidden_layers))
    return replace(model, tensors=tuple(SHARED_TENSORS.items()) if size else ())


DEFAULTS = {"eos_token_id": 2}
FIXED = {"use_sliding_window": False, "layer_types": None, "mlp_bias": False}

FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    granite_moe,
    fields=GraniteMoeFields,
    defaults=DEFAULTS,
    fixed={**FIXED, "shared_intermediate_size": 0},
    tensors=TENSORS,
)
