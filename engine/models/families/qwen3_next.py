"""Qwen3-Next: delta nets with every fourth layer full attention behind a gate, and experts."""

from dataclasses import replace

import msgspec

from engine.models.families.gemma2 import plus_one
from engine.models.families.glm4_moe import FURTHER, FurtherLayers
from engine.models.families.qwen3_moe import QwenMoeFields
from engine.models.family import (
    Family,
    decoder_spec,
    linear_layers,
    uniform_rope,
    with_attention,
    with_experts,
    with_mixers,
)
from engine.models.head_specs import MTPHeadSpec
from engine.models.layers.delta_net import DeltaNetSpec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "mlp_norm": f"{LAYER}post_attention_layernorm",
    "attention.q_norm": f"{LAYER}self_attn.q_norm",
    "attention.k_norm": f"{LAYER}self_attn.k_norm",
    "norm": "model.norm",
}
SCALES = {f"{name}.scale": tensors(f"{stored}.weight", transform=plus_one) for name, stored in NORMS.items()}
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25}
FIXED = {"use_sliding_window": False, "mlp_bias": False}
PREDICTOR = MTPHeadSpec("mtp.", reads_first=True, chains_normed=True)


class DeltaNetFields(QwenMoeFields):
    """The keys of layers with a delta net, with the defaults of transformers."""

    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    full_attention_interval: Count = 4
    mtp_num_hidden_layers: FurtherLayers = 1

    @property
    def delta_net(self) -> DeltaNetSpec:
        """Their mixer. Raises UnsupportedError."""
        return DeltaNetSpec(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            self.activation,
        )

    @property
    def types(self) -> list[str]:
        """``layer_types``; by default each layer is linear but for the last of an interval."""
        layers = range(1, self.num_hidden_layers + 1)
        each = ["linear_attention" if layer % self.full_attention_interval else "full_attention" for layer in layers]
        return each if self.layer_types is None else self.layer_types


class Qwen3NextFields(DeltaNetFields):
    """The family's own keys."""

    shared_expert_intermediate_size: Count = 512


def delta_net_model(fields: DeltaNetFields) -> ModelSpec:
    """Gated attention with a partial rope, and delta nets in the linear layers."""
    plain = msgspec.structs.replace(fields, layer_types=None)
    ropes = [uniform_rope(plain, partial=True)] * fields.num_hidden_layers
    model = decoder_spec(plain, qk_norm=True, ropes=ropes)
    further = (PREDICTOR,) * fields.mtp_num_hidden_layers
    model = replace(with_attention(model, gated=True), unserved=((PREDICTOR.prefix, FURTHER),), further_layers=further)
    return with_mixers(model, fields.delta_net, linear_layers(fields.types, fields.num_hidden_layers))


def qwen3_next(fields: Qwen3NextFields) -> ModelSpec:
    """Layers without experts are dense."""
    experts = fields.experts_beside(fields.shared_expert_intermediate_size)
    return with_experts(delta_net_model(fields), experts, fields.sparse_layers)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    qwen3_next,
    fields=Qwen3NextFields,
    defaults={
        **DEFAULTS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    fixed=FIXED,
    tensors=SCALES,
)
