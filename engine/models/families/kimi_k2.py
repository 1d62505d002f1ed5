"""Kimi K2: DeepSeek-V3 under another name."""

from engine.models.families.deepseek_v2 import LatentFields
from engine.models.families.deepseek_v3 import DEFAULTS, FIXED, SUPPORTED, deepseek_v3
from engine.models.family import Family

FAMILY = Family(
    "kimi_k2",
    "DeepseekV3ForCausalLM",
    deepseek_v3,
    fields=LatentFields,
    defaults=DEFAULTS,
    fixed=FIXED,
    supported=SUPPORTED,
)
