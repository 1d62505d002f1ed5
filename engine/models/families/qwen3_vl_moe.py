"""Qwen3-VL with experts and its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    text="qwen3_vl_moe_text",
    parts={"visual.": "vision tower"},
)
