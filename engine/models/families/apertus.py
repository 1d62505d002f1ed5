"""Apertus: queries and keys are normed, and the feed-forward has no gate, but an activation that is learned."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.layers.feed_forward import GatedSpec
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

THETA = 12e6
ROPE = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def apertus(fields: Fields) -> ModelSpec:
    """``hidden_act`` may be one that is not learned. ``eps`` is stored, but not learned: it is XIELU's."""
    is_learned = fields.hidden_act == "xielu"
    if is_learned:
        fields = msgspec.structs.replace(fields, hidden_act="silu")
    feed_forward = GatedSpec(fields.intermediate_size, False, fields.activation, gated=False, xielu=is_learned)
    ropes = [uniform_rope(fields, unless_given=ROPE)] * fields.num_hidden_layers
    model = decoder_spec(fields, qk_norm=True, feed_forward=feed_forward, ropes=ropes)
    return replace(model, unused_tensors=r"model\.layers\.\d+\.mlp\.act_fn\.eps")


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    apertus,
    defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": THETA, "eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
    tensors={
        "attention_norm.scale": tensors(f"{LAYER}attention_layernorm.weight"),
        "mlp_norm.scale": tensors(f"{LAYER}feedforward_layernorm.weight"),
    },
)
