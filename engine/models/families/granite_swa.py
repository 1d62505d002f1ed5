"""Granite with windows and attention sinks: a full layer to three windowed ones, each with a rope of its own or none."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from engine.models.families.granite import GraniteFields, granite
from engine.models.family import Family, uniform_rope, with_attention
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import require
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec

AnyGranite = TypeVar("AnyGranite", bound=GraniteFields)


class GraniteSWAFields(GraniteFields):
    """The family's own keys, with the defaults of transformers."""

    layer_rope_theta: list[float] | None = None
    """For each layer the base of its rope, or 0 if it has none; by default all have the same."""


def with_windows(
    granite_of: Callable[[AnyGranite], ModelSpec], fields: AnyGranite, thetas: list[float] | None
) -> ModelSpec:
    """A Granite with sinks. By default layers 0, 4, 8 ... have full attention. ``thetas`` as of GraniteSWAFields."""
    layers = fields.num_hidden_layers
    types = fields.layer_types or [("sliding" if layer % 4 else "full") + "_attention" for layer in range(layers)]
    model = with_attention(granite_of(msgspec.structs.replace(fields, layer_types=types)), sinks=True)
    if thetas is None:
        return model
    rope = uniform_rope(fields)
    require(len(thetas) == layers, f"layer_rope_theta has {len(thetas)} entries for {layers} layers")
    require(min(thetas) >= 0, f"layer_rope_theta has {min(thetas)}, which is below 0")
    blocks = (
        replace(block, mixer=replace(self_attention(block), rope=replace(rope, theta=theta) if theta else NO_ROPE))
        for block, theta in zip(model.blocks, thetas, strict=True)
    )
    return replace(model, blocks=tuple(blocks))


def granite_swa(fields: GraniteSWAFields) -> ModelSpec:
    """See with_windows."""
    return with_windows(granite, fields, fields.layer_rope_theta)


FAMILY = Family(
    "granite_swa",
    "GraniteSWAForCausalLM",
    granite_swa,
    fields=GraniteSWAFields,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 100257,
    },
    fixed={"use_sliding_window": True},
)
