"""ERNIE 4.5 with experts: rope in neighbouring pairs, experts and shared ones in the layers between two numbers."""

from dataclasses import replace

from engine.models.family import Family, Fields, decoder_spec, uniform_rope, with_experts
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.experts import ExpertsSpec, gated
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

CORRECTION = tensors(f"{LAYER}mlp.moe_statics.e_score_correction_bias", stored="() scores")


class ErnieMoeFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    """The last layer that may have experts; -1 is the last of all."""
    moe_layer_interval: Count = 1


def ernie4_5_moe(fields: ErnieMoeFields) -> ModelSpec:
    """Layers that predict further tokens are not used."""
    layers, step, end = fields.num_hidden_layers, fields.moe_layer_interval, fields.moe_layer_end_index
    allowed = range(fields.moe_layer_start_index, (layers - 1 if end == -1 else end) + 1)
    sparse = [layer for layer in range(step - 1, layers, step) if layer in allowed]
    size, activation = fields.moe_intermediate_size, fields.activation
    shared = size * fields.moe_num_shared_experts
    experts = ExpertsSpec(
        size,
        fields.moe_num_experts,
        fields.moe_k,
        RouterSpec(correction=True),
        activation,
        shared=GatedSpec(shared, activation=activation) if shared else None,
    )
    model = decoder_spec(fields, ropes=[replace(uniform_rope(fields), interleaved=True)] * layers)
    rules = {"mlp.router.correction": CORRECTION} if sparse else {}
    if sparse and shared:
        rules |= gated("mlp.shared", "mlp.shared_experts")
    model = with_experts(model, experts, sparse)
    return replace(model, tensors=tuple(rules.items()), unused_tensors=r"model\.mtp_.*")


FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ernie4_5_moe,
    fields=ErnieMoeFields,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "attention_bias": False, "mlp_bias": False},
    supported={"use_bias": (False, None), "moe_norm_min": (1e-12, None)},
)
