"""StableLM: norms subtract the mean and have biases; a quarter of each head is rotated."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope, with_attention
from engine.models.requirements import Positive, require
from engine.models.rope_spec import RopeSpec
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class LayerNormFields(Fields):
    """The key of norms that subtract the mean, with the default of most families that have it."""

    layer_norm_eps: Positive = 1e-5


class StableLmFields(LayerNormFields):
    """The family's own keys, with the defaults of transformers."""

    use_qkv_bias: bool = False
    use_parallel_residual: bool = False
    qk_layernorm: bool = False


def even_ropes(fields: Fields) -> list[RopeSpec]:
    """The ropes of all layers, which rotate a part of a head. Raises UnsupportedError if that is odd."""
    rope = uniform_rope(fields, partial=True)
    require(
        (rope.rotary_dim or 0) % 2 == 0, f"an odd number of rotated dimensions, {rope.rotary_dim}, is not supported"
    )
    return [rope] * fields.num_hidden_layers


def stablelm(fields: StableLmFields) -> ModelSpec:
    """With ``use_parallel_residual`` attention and feed-forward share a norm."""
    fields = msgspec.structs.replace(fields, rms_norm_eps=fields.layer_norm_eps)
    model = decoder_spec(fields, qkv_bias=fields.use_qkv_bias, qk_norm=fields.qk_layernorm, ropes=even_ropes(fields))
    blocks = tuple(replace(block, is_parallel=fields.use_parallel_residual) for block in model.blocks)
    model = replace(model, blocks=blocks, centered_norms=True, norm_bias=True)
    if not fields.qk_layernorm:
        return model
    rules = {
        f"attention.{part}_norm.scale": tensors(
            f"{LAYER}self_attn.{part}_layernorm.norms.{{{axis}}}.weight", repeated=(0,)
        )
        for part, axis in (("q", "heads"), ("k", "kv_heads"))
    }
    return replace(with_attention(model, norms_by_head=True), tensors=tuple(rules.items()))


FAMILY = Family(
    "stablelm",
    "StableLmForCausalLM",
    stablelm,
    fields=StableLmFields,
    defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25, "eos_token_id": 0},
    fixed={
        "use_sliding_window": False,
        "layer_types": None,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
