"""Hunyuan, dense (0.5B to 7B): queries and keys are normed behind the rope, whose base a fixed alpha stretches."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope, with_attention
from engine.models.requirements import Positive, UnsupportedError, require
from engine.models.rope_spec import RopeSpec
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class _Alpha(msgspec.Struct):
    """The keys of rope parameters by which the base is stretched."""

    alpha: Positive | None = None
    rope_type: str | None = None
    type: str | None = None


def hunyuan_v1_dense(fields: Fields) -> ModelSpec:
    """Llama, but for its norms and its rope."""
    model = decoder_spec(fields, qk_norm=True, ropes=[_rope(fields)] * fields.num_hidden_layers)
    return with_attention(model, norms_behind_rope=True)


def _rope(fields: Fields) -> RopeSpec:
    """Published configs call it ``dynamic``; with ``alpha`` it is the same at all lengths."""
    given = fields.rope_scaling or fields.rope_parameters or {}
    try:
        read = msgspec.convert(given, _Alpha)
    except msgspec.ValidationError as error:
        raise UnsupportedError(f"rope parameters: {error}") from error
    others = {key: value for key, value in given.items() if key != "alpha"}
    rope = uniform_rope(msgspec.structs.replace(fields, rope_scaling=others))
    if read.alpha is None or (read.rope_type or read.type) != "dynamic":
        return rope
    size = fields.size_of_head
    require(size > 2, f"alpha {read.alpha} needs a head_dim above 2")
    return replace(rope, theta=rope.theta * read.alpha ** (size / (size - 2)))


NORMS = {
    "attention.q_norm.scale": tensors(f"{LAYER}self_attn.query_layernorm.weight"),
    "attention.k_norm.scale": tensors(f"{LAYER}self_attn.key_layernorm.weight"),
}
FIXED = {"use_sliding_window": False, "layer_types": None, "mlp_bias": False}
FAMILY = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    hunyuan_v1_dense,
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2},
    fixed=FIXED,
    tensors=NORMS,
)
