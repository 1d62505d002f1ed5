"""Qwen 3: queries and keys are normed."""

from functools import partial

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    partial(decoder_spec, qk_norm=True),
    defaults={"head_dim": 128},
    fixed={"mlp_bias": False},
)
