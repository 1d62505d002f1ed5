"""Gemma 3: five windowed layers to a full one, each with its own rope; queries and keys are normed."""

import msgspec

from engine.models.families.gemma2 import SCALES, plus_one
from engine.models.family import Family, Fields, decoder_spec, layer_pattern, ropes_by_layer_type
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors


class Gemma3Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Positive = 256
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Positive | None = None


def gemma3(fields: Gemma3Fields) -> ModelSpec:
    """transformers' code of this family reads no ``attn_logit_softcapping``."""
    types = layer_pattern(fields, fields.sliding_window_pattern)
    fields = msgspec.structs.replace(fields, layer_types=types, hidden_act=fields.hidden_activation)
    thetas = fields.rope_theta or 1e6, fields.rope_local_base_freq or 1e4
    return decoder_spec(
        fields,
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        qk_norm=True,
        norms=NormPlan.BOTH,
        ropes=ropes_by_layer_type(fields, full_theta=thetas[0], sliding_theta=thetas[1]),
        embedding_multiplier=fields.hidden_size**0.5,
        logit_soft_cap=fields.final_logit_softcapping,
    )


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    gemma3,
    fields=Gemma3Fields,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False},
    supported={"use_bidirectional_attention": (None, False)},
    tensors=SCALES
    | {
        f"attention.{name}.scale": tensors(f"{LAYER}self_attn.{name}.weight", transform=plus_one)
        for name in ("q_norm", "k_norm")
    },
)
