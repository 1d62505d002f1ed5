"""OLMo 3: OLMo 2 with three windowed layers to a full one; rope is scaled in the full ones alone."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, layer_pattern, ropes_by_layer_type
from engine.models.spec import ModelSpec, NormPlan

THETA = 500_000.0


def olmo3(fields: Fields) -> ModelSpec:
    """``rope_theta`` is that of the full layers; transformers 5 gives the others its default."""
    fields = msgspec.structs.replace(fields, layer_types=layer_pattern(fields, 4))
    ropes = ropes_by_layer_type(fields, full_theta=fields.rope_theta or THETA, sliding_theta=THETA)
    return decoder_spec(fields, joint_qk_norm=True, norms=NormPlan.AFTER, ropes=ropes)


FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    olmo3,
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    fixed={"use_sliding_window": True, "mlp_bias": False},
)
