"""Qwen 3.5, dense: Qwen3-Next's layers, whose products are stored one by one."""

from dataclasses import replace

from engine.models.families.qwen3_next import DEFAULTS, FIXED, SCALES, DeltaNetFields, delta_net_model
from engine.models.family import Family
from engine.models.spec import ModelSpec


def qwen3_5(fields: DeltaNetFields) -> ModelSpec:
    """A model of text has one position a token, so the sections of its rope are all the same."""
    model, net = delta_net_model(fields), fields.delta_net
    rules = net.rules_of_parts if net in model.mixers else {}
    return replace(model, tensors=tuple(rules.items()))


FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    qwen3_5,
    fields=DeltaNetFields,
    defaults={
        **DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    fixed=FIXED,
    tensors=SCALES,
)
