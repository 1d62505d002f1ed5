"""ERNIE 4.5, dense: rope in neighbouring pairs."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.spec import ModelSpec


class ErnieFields(Fields):
    """The family's own key, with the default of transformers."""

    use_bias: bool | None = False


def ernie4_5(fields: ErnieFields) -> ModelSpec:
    """``use_bias`` is of all products but the head."""
    bias = bool(fields.use_bias)
    rope = replace(uniform_rope(fields), interleaved=True)
    fields = msgspec.structs.replace(fields, attention_bias=bias, mlp_bias=bias)
    return decoder_spec(fields, ropes=[rope] * fields.num_hidden_layers)


FAMILY = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    ernie4_5,
    fields=ErnieFields,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None},
)
