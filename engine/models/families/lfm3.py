"""LFM3: LFM2 with windows in every other layer of attention, gates by head, and norms on both sides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine.models.families.lfm2 import DENSE_TENSORS, TENSORS, ShortConvolutionFields, convolution_layers
from engine.models.family import Family, check_types, decoder_spec, rope_reader, with_attention, with_mixers
from engine.models.requirements import Count, Positive, require
from engine.models.rope_fields import LAYER_TYPES
from engine.models.rope_spec import NO_ROPE, RopeSpec
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

FULL, SLIDING = LAYER_TYPES
CONVOLUTION = "conv"
THETA = 1_000_000.0
ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5},
}
G_PROJ, GATE_PROJ = (tensors(f"{LAYER}self_attn.{name}_proj.weight") for name in ("g", "gate"))
GATES = {"attention.gate_kernel": replace(G_PROJ, otherwise=GATE_PROJ)}
"""transformers' module, whose name adapters have; checkpoints have the other."""
POST_NORMS = {
    "attention_post_norm.scale": tensors(f"{LAYER}post_operator_norm.weight"),
    "mlp_post_norm.scale": tensors(f"{LAYER}post_ffn_norm.weight"),
}


class Lfm3Fields(ShortConvolutionFields):
    """The family's own keys, with the defaults of transformers."""

    taps: Count = msgspec.field(default=7, name="conv_L_cache")
    rms_norm_eps: Positive = 0.0
    """Another name of ``norm_eps``, which goes before it; 0 where config.json has none."""
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    @property
    def types(self) -> list[str]:
        """``layer_types``; by default every second layer from the third on has attention, full and windowed in turn."""
        if self.layer_types is not None:
            return self.layer_types
        period = (SLIDING, CONVOLUTION, FULL, CONVOLUTION)
        return [CONVOLUTION if layer == 0 else period[layer % 4] for layer in range(self.num_hidden_layers)]

    @property
    def ropes(self) -> dict[str, Any]:
        """The rope parameters by layer type."""
        return self.rope_scaling or (ROPES if self.rope_parameters is None else self.rope_parameters)


def lfm3(fields: Lfm3Fields) -> ModelSpec:
    """Raises UnsupportedError."""
    types = fields.types
    check_types(types, (CONVOLUTION, *LAYER_TYPES), fields.num_hidden_layers)
    plain = msgspec.structs.replace(
        fields,
        layer_types=[SLIDING if kind == SLIDING else FULL for kind in types],
        rms_norm_eps=fields.rms_norm_eps or fields.norm_eps,
    )
    norms, rules = (NormPlan.BOTH, POST_NORMS) if fields.use_sandwich_norm else (NormPlan.BEFORE, {})
    model = decoder_spec(plain, qk_norm=True, norms=norms, ropes=ropes(fields, types))
    if fields.use_attention_gate:
        model, rules = with_attention(model, gate_proj=True, gates_by_head=True), rules | GATES
    return replace(with_mixers(model, fields.convolution, convolution_layers(types)), tensors=tuple(rules.items()))


def ropes(fields: Lfm3Fields, types: Sequence[str]) -> list[RopeSpec]:
    """The rope of each layer, none of a convolution. Raises UnsupportedError."""
    given, reader = fields.ropes, rope_reader(fields)
    for key in given:
        require(key in LAYER_TYPES, f"rope_parameters has {key}; supported are {' and '.join(LAYER_TYPES)} in it")
    found = {CONVOLUTION: NO_ROPE}
    for kind in dict.fromkeys(kind for kind in types if kind != CONVOLUTION):
        own: Any = given.get(kind)
        require(isinstance(own, dict), f"rope_parameters has no {kind} that is an object")
        found[kind] = reader.read(own, fields.rope_theta or THETA)
    return [found[kind] for kind in types]


FAMILY = Family(
    "lfm3",
    "Lfm3ForCausalLM",
    lfm3,
    fields=Lfm3Fields,
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "sliding_window": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 124_900,
    },
    fixed={"hidden_act": "silu", "use_sliding_window": True, "mlp_bias": False},
    tensors=TENSORS | DENSE_TENSORS,
)
