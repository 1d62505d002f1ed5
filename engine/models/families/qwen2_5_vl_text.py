"""The text model of Qwen2.5-VL: Qwen 2."""

from engine.models.families.qwen2_vl_text import DEFAULTS, FIXED, qwen2_vl
from engine.models.family import Family

FAMILY = Family("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", qwen2_vl, defaults=DEFAULTS, fixed=FIXED)
