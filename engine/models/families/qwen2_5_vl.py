"""Qwen2.5-VL with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    text="qwen2_5_vl_text",
    parts={"visual.": "vision tower"},
    is_flat=True,
)
