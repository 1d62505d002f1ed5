"""Mixtral: Mistral with a mixture of experts in each layer; config.json may set a window."""

from engine.models.family import Count, Family, Fields, decoder_spec, require
from engine.models.mixture import MixtureSpec
from engine.models.spec import ModelSpec


class MixtralFields(Fields):
    """Its own keys; the defaults are transformers'."""

    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


def mixtral(fields: MixtralFields) -> ModelSpec:
    """All layers have the same experts."""
    experts, chosen = fields.num_local_experts, fields.num_experts_per_tok
    require(chosen <= experts, f"num_experts_per_tok {chosen} is more than num_local_experts {experts}")
    return decoder_spec(fields, feed_forward=MixtureSpec(fields.intermediate_size, experts, chosen))


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
)
