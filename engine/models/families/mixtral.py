"""Mixtral: Mistral with a mixture of experts in each layer; config.json may set a window."""

from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.experts import ExpertsSpec, one_by_one
from engine.models.requirements import Count
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class MixtralFields(Fields):
    """Its own keys; the defaults are transformers'."""

    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


def mixtral(fields: MixtralFields) -> ModelSpec:
    """All layers have the same experts."""
    sizes = fields.intermediate_size, fields.num_local_experts, fields.num_experts_per_tok
    experts = ExpertsSpec(*sizes, activation=fields.activation)
    return decoder_spec(fields, feed_forward=experts)


TENSORS = one_by_one("block_sparse_moe.experts.", "w1", "w3", "w2")

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    mixtral,
    fields=MixtralFields,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": True, "max_window_layers": 0, "attention_bias": False},
    tensors={"mlp.router.kernel": tensors(f"{LAYER}block_sparse_moe.gate.weight"), **TENSORS},
)
