"""Helium: Llama with rope in neighbouring pairs."""

from dataclasses import replace

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.spec import ModelSpec


def helium(fields: Fields) -> ModelSpec:
    """``attention_bias`` is of queries, keys and values alone."""
    rope = replace(uniform_rope(fields), interleaved=True)
    return decoder_spec(fields, output_bias=False, ropes=[rope] * fields.num_hidden_layers)


FAMILY = Family(
    "helium",
    "HeliumForCausalLM",
    helium,
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None},
)
