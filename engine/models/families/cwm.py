"""CWM (Code World Model): Llama 3 with windows, of which the first of every four layers has none."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.spec import ModelSpec

THETA = 1e6
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def cwm(fields: Fields) -> ModelSpec:
    """Layers 0, 4, 8 ... have no window, unless config.json lists the sliding layers."""
    layers = range(fields.num_hidden_layers)
    if fields.layer_types is None:
        types = ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
        fields = msgspec.structs.replace(fields, layer_types=types)
    return decoder_spec(fields, ropes=[uniform_rope(fields, unless_given=ROPE)] * len(layers))


FAMILY = Family(
    "cwm",
    "CwmForCausalLM",
    cwm,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "sliding_window": 8192,
        "eos_token_id": [128001, 128008, 128009],
    },
    fixed={"use_sliding_window": True, "attention_bias": False},
)
