"""Gemma 2: alternating windows, four norms per layer, soft caps, norm scales stored minus 1."""

from typing import Any

import msgspec
from numpy.typing import NDArray

from engine.models.family import Family, Fields, decoder_spec, layer_pattern
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors


class Gemma2Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


def gemma2(fields: Gemma2Fields, norms: NormPlan = NormPlan.BOTH) -> ModelSpec:
    """Layers 0, 2, 4 ... slide, unless config.json lists the sliding layers."""
    return decoder_spec(
        msgspec.structs.replace(fields, layer_types=layer_pattern(fields, 2), hidden_act=fields.hidden_activation),
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        attention_soft_cap=fields.attn_logit_softcapping,
        norms=norms,
        embedding_multiplier=fields.hidden_size**0.5,
        logit_soft_cap=fields.final_logit_softcapping,
    )


def plus_one(scale: NDArray[Any]) -> NDArray[Any]:
    """The scale of a norm that is stored less 1."""
    return scale + 1


NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "attention_post_norm": f"{LAYER}post_attention_layernorm",
    "mlp_norm": f"{LAYER}pre_feedforward_layernorm",
    "mlp_post_norm": f"{LAYER}post_feedforward_layernorm",
    "norm": "model.norm",
}
SCALES = {f"{name}.scale": tensors(f"{stored}.weight", transform=plus_one) for name, stored in NORMS.items()}
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1}
FIXED = {"use_sliding_window": True, "mlp_bias": False}

FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    gemma2,
    fields=Gemma2Fields,
    defaults=DEFAULTS,
    fixed=FIXED,
    supported={"use_bidirectional_attention": (None, False)},
    tensors=SCALES,
)
