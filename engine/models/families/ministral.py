"""Ministral 8B: Mistral in which layer_types says which layers slide."""

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    decoder_spec,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    fixed={"use_sliding_window": True, "max_window_layers": 0, "attention_bias": False, "mlp_bias": False},
)
