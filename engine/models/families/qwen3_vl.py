"""Qwen3-VL with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    text="qwen3_vl_text",
    parts={"visual.": "vision tower"},
)
