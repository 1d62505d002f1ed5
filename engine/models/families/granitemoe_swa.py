"""Granite with experts, windows and attention sinks."""

from engine.models.families.granite_swa import with_windows
from engine.models.families.granitemoe import DEFAULTS, MOE, GraniteMoeFields, granite_moe
from engine.models.family import Family
from engine.models.layers.experts import stacked
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class GraniteMoeSWAFields(GraniteMoeFields):
    """The family's own keys, with the defaults of transformers."""

    layer_rope_theta: list[float] | None = None


def granite_moe_swa(fields: GraniteMoeSWAFields) -> ModelSpec:
    """See with_windows."""
    return with_windows(granite_moe, fields, fields.layer_rope_theta)


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
