"""K-EXAONE: EXAONE 4's windows with norms before attention and feed-forward, and GLM-4.5's experts."""

from dataclasses import replace

import msgspec

from engine.models.families.exaone4 import FIXED, hybrid_decoder
from engine.models.families.glm4_moe import FURTHER, SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, sparse_layers
from engine.models.requirements import Count
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

ROUTER = {"mlp.router.correction": tensors(f"{LAYER}mlp.e_score_correction_bias")}


class ExaoneMoeFields(SigmoidMoeFields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 64
    num_shared_experts: Count = 1
    sliding_window_pattern: int | str | None = 4
    mlp_layer_types: list[str] | None = None


def exaone_moe(fields: ExaoneMoeFields) -> ModelSpec:
    """``mlp_layer_types`` goes before ``first_k_dense_replace``."""
    fields = msgspec.structs.replace(
        fields, n_routed_experts=fields.num_experts, n_shared_experts=fields.num_shared_experts
    )
    types = fields.mlp_layer_types
    sparse = None if types is None else sparse_layers(types, fields.num_hidden_layers)
    model = hybrid_decoder(fields, fields.sliding_window_pattern, NormPlan.BEFORE)
    return replace(with_sigmoid_experts(model, fields, sparse, ROUTER), unserved=(("mtp.", FURTHER),))


FAMILY = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    exaone_moe,
    fields=ExaoneMoeFields,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 53,
    },
    fixed=FIXED,
    supported={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "swiglu_limits": (None,),
        "sliding_windows": (None,),
    },
)
