"""Nemotron-4 and Minitron: norms subtract the mean and are stored less 1; a feed-forward without a gate."""

from dataclasses import replace

import msgspec

from engine.models.families.gemma2 import plus_one
from engine.models.families.stablelm import even_ropes
from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "mlp_norm": f"{LAYER}post_attention_layernorm",
    "norm": "model.norm",
}


class NemotronFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    norm_eps: Positive = 1e-5


def nemotron(fields: NemotronFields) -> ModelSpec:
    """Half of each head is rotated, unless config.json says another part."""
    fields = msgspec.structs.replace(fields, rms_norm_eps=fields.norm_eps)
    plain = GatedSpec(fields.intermediate_size, fields.mlp_bias, fields.activation, gated=False)
    model = decoder_spec(fields, feed_forward=plain, ropes=even_ropes(fields))
    return replace(model, centered_norms=True, norm_bias=True)


FAMILY = Family(
    "nemotron",
    "NemotronForCausalLM",
    nemotron,
    fields=NemotronFields,
    defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "eos_token_id": 3},
    fixed={"use_sliding_window": False, "layer_types": None},
    tensors={f"{name}.scale": tensors(f"{stored}.weight", transform=plus_one) for name, stored in NORMS.items()},
)
