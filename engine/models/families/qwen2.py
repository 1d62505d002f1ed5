"""Qwen 2 and 2.5: q, k and v have biases."""

from functools import partial

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    partial(decoder_spec, qkv_bias=True),
    fixed={"attention_bias": False, "mlp_bias": False},
)
