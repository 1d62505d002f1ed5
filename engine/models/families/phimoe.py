"""Phi-3.5-MoE: Mixtral with norms that subtract the mean, a sparse mixer as its router, and biases."""

from dataclasses import replace

import msgspec

from engine.models.families.mixtral import FAMILY as MIXTRAL
from engine.models.families.mixtral import MixtralFields
from engine.models.family import Family, decoder_spec, uniform_rope
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec
from engine.models.requirements import Positive, UnsupportedError
from engine.models.rope_spec import RopeSpec
from engine.models.spec import ModelSpec

CHOSEN = 2
"""Experts of a token, whatever config.json has."""


class PhimoeFields(MixtralFields):
    """The family's own keys, with the defaults of transformers."""

    num_local_experts: int = 16
    router_jitter_noise: float = 0.01
    lm_head_bias: bool = False


class _Magnitudes(msgspec.Struct):
    """What cosines and sines are multiplied by, with short factors and with long ones."""

    short_mscale: Positive | None = None
    long_mscale: Positive | None = None


def phimoe(fields: PhimoeFields) -> ModelSpec:
    """All layers have the same experts."""
    router = RouterSpec(Scoring.SPARSE_MIXER, jitter=fields.router_jitter_noise)
    experts = ExpertsSpec(
        fields.intermediate_size, fields.num_local_experts, CHOSEN, router, activation=fields.activation
    )
    model = decoder_spec(fields, feed_forward=experts, ropes=[_rope(fields)] * fields.num_hidden_layers)
    return replace(model, centered_norms=True, norm_bias=True, head_bias=fields.lm_head_bias)


def _rope(fields: PhimoeFields) -> RopeSpec:
    """One that is scaled has both magnitudes, and they stand for its own."""
    given = fields.rope_scaling or fields.rope_parameters or {}
    try:
        read = msgspec.convert(given, _Magnitudes)
    except msgspec.ValidationError as error:
        raise UnsupportedError(f"rope parameters: {error}") from error
    others = {key: value for key, value in given.items() if key not in _Magnitudes.__struct_fields__}
    rope = uniform_rope(msgspec.structs.replace(fields, rope_scaling=others, rope_parameters=None))
    if rope.scaling == "default":
        return rope
    if read.short_mscale is None or read.long_mscale is None:
        raise UnsupportedError(f"rope type {rope.scaling!r} needs short_mscale and long_mscale")
    return replace(rope, attention_factor=read.short_mscale, long_attention_factor=read.long_mscale)


FAMILY = Family(
    "phimoe",
    "PhimoeForCausalLM",
    phimoe,
    fields=PhimoeFields,
    defaults={
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": True, "max_window_layers": 0, "layer_types": None, "mlp_bias": False},
    supported={"num_experts_per_tok": (CHOSEN, None)},
    tensors=MIXTRAL.tensors,
)
