"""The text model of Gemma 4 Unified: Gemma 4 without experts and without embeddings of each layer."""

from engine.models.families.gemma4_text import DEFAULTS, FIXED, SUPPORTED, Gemma4Fields, gemma4
from engine.models.family import Family

FAMILY = Family(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    gemma4,
    fields=Gemma4Fields,
    defaults={**DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
    fixed={**FIXED, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    supported=SUPPORTED,
)
