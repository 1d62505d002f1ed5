"""HyperCLOVA X SEED: Granite with norms behind attention and feed-forward too, and logits that are multiplied."""

from dataclasses import replace

from engine.models.families.granite import GraniteFields, granite
from engine.models.family import Family
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

TENSORS = {
    "attention_post_norm.scale": tensors(f"{LAYER}post_norm1.weight"),
    "mlp_norm.scale": tensors(f"{LAYER}post_attention_layernorm.weight"),
    "mlp_post_norm.scale": tensors(f"{LAYER}post_norm2.weight"),
}
"""Where a layer has norms behind its parts."""


class HyperCLOVAXFields(GraniteFields):
    """The family's own keys, with the defaults of transformers."""

    attention_multiplier: Positive | None = None  # type: ignore[assignment]
    use_post_norm: bool = True


def hyperclovax(fields: HyperCLOVAXFields) -> ModelSpec:
    """``logits_scaling`` multiplies, where Granite's divides."""
    model = replace(granite(fields), logit_scale=fields.logits_scaling)
    if not fields.use_post_norm:
        return model
    blocks = tuple(replace(block, norms=NormPlan.BOTH) for block in model.blocks)
    return replace(model, blocks=blocks, tensors=tuple(TENSORS.items()))


FAMILY = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    hyperclovax,
    fields=HyperCLOVAXFields,
    defaults={"eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None},
)
