"""OLMo 2: norms after attention and feed-forward alone; one norm for all query heads, one for all keys."""

from functools import partial

from engine.models.family import Family, decoder_spec
from engine.models.spec import NormPlan

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    partial(decoder_spec, joint_qk_norm=True, norms=NormPlan.AFTER),
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
