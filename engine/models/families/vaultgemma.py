"""VaultGemma: Gemma 2 without norms behind attention and feed-forward."""

from functools import partial

from engine.models.families.gemma2 import DEFAULTS, FIXED, SCALES, Gemma2Fields, gemma2
from engine.models.family import Family
from engine.models.spec import NormPlan

FAMILY = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    partial(gemma2, norms=NormPlan.BEFORE),
    fields=Gemma2Fields,
    defaults=DEFAULTS,
    fixed=FIXED,
    tensors={name: rule for name, rule in SCALES.items() if "post_norm" not in name},
)
