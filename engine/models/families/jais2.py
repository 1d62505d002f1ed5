"""Jais 2: Llama with biases everywhere, norms that subtract the mean, and a feed-forward that has no gate."""

from dataclasses import replace

import msgspec

from engine.models.families.arcee import arcee
from engine.models.families.stablelm import LayerNormFields
from engine.models.family import Family
from engine.models.spec import ModelSpec


def jais2(fields: LayerNormFields) -> ModelSpec:
    """Norms have biases too."""
    model = arcee(msgspec.structs.replace(fields, rms_norm_eps=fields.layer_norm_eps))
    return replace(model, centered_norms=True, norm_bias=True)


FAMILY = Family(
    "jais2",
    "Jais2ForCausalLM",
    jais2,
    fields=LayerNormFields,
    defaults={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True, "eos_token_id": 150024},
    fixed={"use_sliding_window": False, "layer_types": None},
)
