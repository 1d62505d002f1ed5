"""OLMo: Llama with norms that subtract the mean and have no parameters; queries, keys and values may be clamped."""

from dataclasses import replace

from engine.models.family import Family, Fields, decoder_spec, with_attention
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec


class OlmoFields(Fields):
    """The family's own key."""

    clip_qkv: Positive | None = None


def olmo(fields: OlmoFields) -> ModelSpec:
    """Each layer has full attention."""
    model = with_attention(decoder_spec(fields), clip=fields.clip_qkv)
    return replace(model, centered_norms=True, norm_scales=False)


FAMILY = Family(
    "olmo",
    "OlmoForCausalLM",
    olmo,
    fields=OlmoFields,
    defaults={"eos_token_id": 50279},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False, "rms_norm_eps": 1e-5},
)
