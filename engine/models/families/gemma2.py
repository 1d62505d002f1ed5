"""Gemma 2: alternating windows, four norms per layer, soft caps, norm scales stored minus 1."""

from typing import Any

import msgspec
from numpy.typing import NDArray

from engine.models.family import Family, Fields, Positive, decoder_spec
from engine.models.feed_forward import Activation, GatedSpec
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors


class Gemma2Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


def gemma2(fields: Gemma2Fields) -> ModelSpec:
    """Layers 0, 2, 4 ... slide, unless config.json lists the sliding layers."""
    if fields.layer_types is None:
        alternating = ["sliding_attention", "full_attention"] * fields.num_hidden_layers
        fields = msgspec.structs.replace(fields, layer_types=alternating[: fields.num_hidden_layers])
    return decoder_spec(
        fields,
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        attention_soft_cap=fields.attn_logit_softcapping,
        feed_forward=GatedSpec(fields.intermediate_size, activation=Activation.GELU_TANH),
        norms=NormPlan.BOTH,
        embedding_multiplier=fields.hidden_size**0.5,
        logit_soft_cap=fields.final_logit_softcapping,
    )


def _plus_one(scale: NDArray[Any]) -> NDArray[Any]:
    return scale + 1


NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "attention_post_norm": f"{LAYER}post_attention_layernorm",
    "mlp_norm": f"{LAYER}pre_feedforward_layernorm",
    "mlp_post_norm": f"{LAYER}post_feedforward_layernorm",
    "norm": "model.norm",
}

FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    gemma2,
    fields=Gemma2Fields,
    defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1},
    fixed={"use_sliding_window": True},
    supported={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "use_bidirectional_attention": (None, False),
    },
    tensors={f"{name}.scale": tensors(f"{stored}.weight", transform=_plus_one) for name, stored in NORMS.items()},
)
