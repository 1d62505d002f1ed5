"""Bamba: Mamba-2 with some layers of attention, whose rope turns half of a head."""

from dataclasses import replace

from engine.models.families.granitemoehybrid import GraniteHybridFields
from engine.models.family import Family, decoder_spec, uniform_rope, with_mixers
from engine.models.layers.experts import gated
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

FEED_FORWARD = f"{LAYER}feed_forward."
BIASES = {
    "mlp.gate_up_bias": tensors(*(f"{FEED_FORWARD}{name}_proj.bias" for name in ("gate", "up")), along="gate_up"),
    "mlp.down_bias": tensors(f"{FEED_FORWARD}down_proj.bias"),
}


TENSORS = {
    "norm.scale": tensors("model.final_layernorm.weight"),
    "mlp_norm.scale": tensors(f"{LAYER}pre_ff_layernorm.weight"),
    **gated("mlp", "feed_forward"),
}


class BambaFields(GraniteHybridFields):
    """The family's own key; the others, of Mamba-2, are Granite's."""

    attn_layer_indices: list[int] | None = None


def bamba(fields: BambaFields) -> ModelSpec:
    """Layers of attention are those that are named."""
    layers, full = fields.num_hidden_layers, fields.attn_layer_indices or []
    model = decoder_spec(fields, ropes=[uniform_rope(fields, partial=True)] * layers)
    model = replace(model, tensors=tuple(BIASES.items())) if fields.mlp_bias else model
    linear = [layer for layer in range(layers) if layer not in full]
    return with_mixers(model, fields.mamba, linear)


FAMILY = Family(
    "bamba",
    "BambaForCausalLM",
    bamba,
    fields=BambaFields,
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "partial_rotary_factor": 0.5},
    tensors=TENSORS,
)
