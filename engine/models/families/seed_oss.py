"""Seed-OSS: queries, keys and values have biases, and the output if config.json says so."""

from engine.models.family import Family, Fields, decoder_spec
from engine.models.spec import ModelSpec


class SeedOssFields(Fields):
    """The family's own key, with the default of transformers."""

    attention_out_bias: bool = False


def seed_oss(fields: SeedOssFields) -> ModelSpec:
    """Llama with other defaults."""
    return decoder_spec(fields, output_bias=fields.attention_out_bias)


FAMILY = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    seed_oss,
    fields=SeedOssFields,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None},
)
