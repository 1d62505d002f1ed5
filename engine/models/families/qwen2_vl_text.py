"""The text model of Qwen2-VL: Qwen 2."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec
from engine.models.spec import ModelSpec


def qwen2_vl(fields: Fields) -> ModelSpec:
    """The rope is ``mrope``, in which the three positions of a token of text are one: the plain one."""
    given = fields.rope_scaling or fields.rope_parameters or {}
    if given.get("rope_type", given.get("type")) == "mrope":
        fields = msgspec.structs.replace(fields, rope_scaling={**given, "rope_type": "default"})
    return decoder_spec(fields, qkv_bias=True)


DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 151645,
}
FIXED = {"head_dim": None, "attention_bias": False, "mlp_bias": False}
FAMILY = Family("qwen2_vl_text", "Qwen2VLForConditionalGeneration", qwen2_vl, defaults=DEFAULTS, fixed=FIXED)
