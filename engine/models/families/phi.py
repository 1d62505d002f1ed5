"""Phi-1.5 and Phi-2: attention beside the feed-forward, and biases everywhere, of logits too."""

from dataclasses import replace

import msgspec

from engine.models.families.stablelm import LayerNormFields, even_ropes
from engine.models.family import Family, decoder_spec
from engine.models.layers.feed_forward import GatedSpec, plain_rules
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


def phi(fields: LayerNormFields) -> ModelSpec:
    """Half of each head is rotated, unless config.json says another part."""
    fields = msgspec.structs.replace(fields, rms_norm_eps=fields.layer_norm_eps)
    plain = GatedSpec(fields.intermediate_size, True, fields.activation, gated=False)
    model = decoder_spec(fields, feed_forward=plain, ropes=even_ropes(fields))
    blocks = tuple(replace(block, is_parallel=True) for block in model.blocks)
    return replace(model, blocks=blocks, centered_norms=True, norm_bias=True, head_bias=True)


FAMILY = Family(
    "phi",
    "PhiForCausalLM",
    phi,
    fields=LayerNormFields,
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None, "attention_bias": True},
    supported={"qk_layernorm": (False, None)},
    tensors={
        "attention.o_kernel": tensors(f"{LAYER}self_attn.dense.weight"),
        "attention.o_bias": tensors(f"{LAYER}self_attn.dense.bias"),
        **plain_rules("fc1", "fc2", bias=True),
        "norm.scale": tensors("model.final_layernorm.weight"),
        "norm.bias": tensors("model.final_layernorm.bias"),
    },
)
