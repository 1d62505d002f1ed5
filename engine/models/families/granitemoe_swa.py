"""Granite with experts, windows and attention sinks; each layer may have a rope of its own, or none."""

from dataclasses import replace

import msgspec

from engine.models.families.granitemoe import DEFAULTS, MOE, GraniteMoeFields, granite_moe
from engine.models.family import Family, uniform_rope
from engine.models.layers.experts import stacked
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import require
from engine.models.spec import NO_ROPE, ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class GraniteMoeSWAFields(GraniteMoeFields):
    """The family's own keys, with the defaults of transformers."""

    layer_rope_theta: list[float] | None = None


def granite_moe_swa(fields: GraniteMoeSWAFields) -> ModelSpec:
    """Layers 0, 4, 8 ... have full attention, unless config.json lists them. A theta of 0 is no rope."""
    layers, rope, types = range(fields.num_hidden_layers), uniform_rope(fields), fields.layer_types
    if types is None:
        types = ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
    thetas = [rope.theta for _ in layers] if fields.layer_rope_theta is None else fields.layer_rope_theta
    require(
        len(thetas) == len(layers) and min(thetas) >= 0,
        f"layer_rope_theta must be a number of at least 0 for each of {len(layers)} layers",
    )
    model = granite_moe(msgspec.structs.replace(fields, layer_types=types))
    blocks = (
        replace(
            block,
            mixer=replace(self_attention(block), sinks=True, rope=replace(rope, theta=theta) if theta else NO_ROPE),
        )
        for block, theta in zip(model.blocks, thetas, strict=True)
    )
    return replace(model, blocks=tuple(blocks))


FAMILY = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    granite_moe_swa,
    fields=GraniteMoeSWAFields,
    defaults={**DEFAULTS, "sliding_window": 128},
    fixed={"use_sliding_window": True, "mlp_bias": False},
    tensors={
        "mlp.router.kernel": tensors(f"{LAYER}{MOE}router.weight"),
        **stacked(f"{MOE}experts.gate_up_proj", f"{MOE}experts.down_proj"),
    },
)
