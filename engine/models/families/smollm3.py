"""SmolLM3: every fourth layer has no rope."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope
from engine.models.requirements import Count, require
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec


class SmolLM3Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    no_rope_layers: list[int] | None = None
    """For each layer 1 if it has rope, 0 if not."""
    no_rope_layer_interval: Count = 4


def smollm3(fields: SmolLM3Fields) -> ModelSpec:
    """If a window is in use and ``layer_types`` does not say where, layers without rope slide."""
    layers, interval = fields.num_hidden_layers, fields.no_rope_layer_interval
    ropes = fields.no_rope_layers or [(layer + 1) % interval for layer in range(layers)]
    require(len(ropes) == layers, f"no_rope_layers has {len(ropes)} entries for {layers} layers")
    if fields.layer_types is None and fields.use_sliding_window and fields.sliding_window:
        types = ["full_attention" if rope else "sliding_attention" for rope in ropes]
        fields = msgspec.structs.replace(fields, layer_types=types)
    each = uniform_rope(fields)
    return decoder_spec(fields, ropes=[each if rope else NO_ROPE for rope in ropes])


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    smollm3,
    fields=SmolLM3Fields,
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
)
