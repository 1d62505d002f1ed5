"""MiniMax-M2: experts chosen by sigmoids, one norm for all query heads and one for all keys."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope, with_experts
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, one_by_one
from engine.models.requirements import Count
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

MOE = "block_sparse_moe."


class MiniMaxM2Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    num_local_experts: Count = 256
    num_experts_per_tok: Count = 8
    rotary_dim: Count | None = None
    """Another way to say ``partial_rotary_factor``."""


def minimax_m2(fields: MiniMaxM2Fields) -> ModelSpec:
    """All layers have the same experts."""
    if fields.rotary_dim is not None and fields.partial_rotary_factor is None:
        fields = msgspec.structs.replace(fields, partial_rotary_factor=fields.rotary_dim / fields.size_of_head)
    experts = ExpertsSpec(
        fields.intermediate_size,
        fields.num_local_experts,
        fields.num_experts_per_tok,
        RouterSpec(Scoring.SIGMOID, correction=True),
        fields.activation,
    )
    layers = fields.num_hidden_layers
    model = decoder_spec(fields, joint_qk_norm=True, ropes=[uniform_rope(fields, partial=True)] * layers)
    return with_experts(model, experts, range(layers))


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    minimax_m2,
    fields=MiniMaxM2Fields,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "eos_token_id": 200020},
    fixed={"use_sliding_window": False, "layer_types": None, "attention_bias": False, "mlp_bias": False},
    supported={"use_qk_norm": (True,), "scoring_func": ("sigmoid",), "shared_intermediate_size": (0,)},
    tensors={
        "mlp.router.kernel": tensors(f"{LAYER}{MOE}gate.weight"),
        "mlp.router.correction": tensors(f"{LAYER}{MOE}e_score_correction_bias"),
        **one_by_one(f"{MOE}experts.", "w1", "w3", "w2"),
    },
)
