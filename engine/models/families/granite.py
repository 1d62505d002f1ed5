"""Granite 3 and 4, dense: embeddings, residuals, attention and logits have multipliers."""

from engine.models.family import Family, Fields, decoder_spec
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec


class GraniteFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


def granite(fields: GraniteFields) -> ModelSpec:
    """Logits are divided by theirs."""
    return decoder_spec(
        fields,
        attention_scale=fields.attention_multiplier,
        embedding_multiplier=fields.embedding_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    granite,
    fields=GraniteFields,
    defaults={"eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None},
)
