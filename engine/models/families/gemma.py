"""Gemma 1: norm scales stored minus 1, embeddings that are multiplied."""

import msgspec

from engine.models.families.gemma2 import plus_one
from engine.models.family import Family, Fields, decoder_spec
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "mlp_norm": f"{LAYER}post_attention_layernorm",
    "norm": "model.norm",
}


def gemma(fields: Fields) -> ModelSpec:
    """Its releases say ``gelu`` and mean the approximation by tanh."""
    if fields.hidden_act == "gelu":
        fields = msgspec.structs.replace(fields, hidden_act="gelu_pytorch_tanh")
    return decoder_spec(fields, embedding_multiplier=fields.hidden_size**0.5)


FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    gemma,
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
    supported={"use_bidirectional_attention": (None, False)},
    tensors={f"{name}.scale": tensors(f"{stored}.weight", transform=plus_one) for name, stored in NORMS.items()},
)
