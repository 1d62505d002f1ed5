"""Qwen2-VL with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    text="qwen2_vl_text",
    parts={"visual.": "vision tower"},
    is_flat=True,
)
