"""Llama 2 and 3."""

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    decoder_spec,
    defaults={"eos_token_id": 2},
    fixed={"use_sliding_window": False},
)
