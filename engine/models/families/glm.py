"""GLM-4 of 2024 (glm-4-9b-chat-hf): half of each head is rotated, in neighbouring pairs."""

from dataclasses import replace

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

GATE_UP = f"{LAYER}mlp.gate_up_proj.weight"
TENSORS = {"mlp.gate_up_kernel": tensors(GATE_UP, GATE_UP, along="gate_up")}
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
FIXED = {"use_sliding_window": False, "layer_types": None, "mlp_bias": False}


def glm(fields: Fields, norms: NormPlan = NormPlan.BEFORE) -> ModelSpec:
    """``attention_bias`` is of queries, keys and values alone."""
    rope = replace(uniform_rope(fields, partial=True), interleaved=True)
    return decoder_spec(fields, output_bias=False, norms=norms, ropes=[rope] * fields.num_hidden_layers)


FAMILY = Family("glm", "GlmForCausalLM", glm, defaults=DEFAULTS, fixed=FIXED, tensors=TENSORS)
