"""Granite 3 with experts and a shared one."""

from engine.models.families.granitemoe import DEFAULTS, FIXED, TENSORS, GraniteMoeFields, granite_moe
from engine.models.family import Family

FAMILY = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    granite_moe,
    fields=GraniteMoeFields,
    defaults=DEFAULTS,
    fixed=FIXED,
    tensors=TENSORS,
)
