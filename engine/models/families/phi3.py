"""Phi-3, Phi-3.5 and Phi-4: fused projections, heads rotated in part, longrope."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.requirements import require_one_of
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

QKV, GATE_UP = f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"


def phi3(fields: Fields) -> ModelSpec:
    """Its early checkpoints call longrope ``su`` or ``yarn``."""
    rope = fields.rope_scaling or fields.rope_parameters or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    require_one_of("rope type", kind, ("default", "longrope", "su", "yarn"))
    if kind != "default":
        fields = msgspec.structs.replace(fields, rope_scaling={**rope, "rope_type": "longrope"})
    return decoder_spec(fields, ropes=[uniform_rope(fields, partial=True)] * fields.num_hidden_layers)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    phi3,
    defaults={
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "eos_token_id": 32000,
    },
    fixed={
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    tensors={
        "attention.qkv_kernel": tensors(QKV, QKV, QKV, along="group"),
        "mlp.gate_up_kernel": tensors(GATE_UP, GATE_UP, along="gate_up"),
    },
)
