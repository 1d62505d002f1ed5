"""GLM-4-0414: GLM-4 with norms after attention and feed-forward too."""

from functools import partial

from engine.models.families.glm import DEFAULTS, FIXED, TENSORS, glm
from engine.models.family import Family
from engine.models.spec import NormPlan
from engine.models.weights.parameters import LAYER, tensors

FAMILY = Family(
    "glm4",
    "Glm4ForCausalLM",
    partial(glm, norms=NormPlan.BOTH),
    defaults=DEFAULTS,
    fixed=FIXED,
    tensors=TENSORS
    | {
        "attention_post_norm.scale": tensors(f"{LAYER}post_self_attn_layernorm.weight"),
        "mlp_norm.scale": tensors(f"{LAYER}post_attention_layernorm.weight"),
        "mlp_post_norm.scale": tensors(f"{LAYER}post_mlp_layernorm.weight"),
    },
)
