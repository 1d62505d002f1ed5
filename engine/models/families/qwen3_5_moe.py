"""Qwen 3.5 with experts and its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    text="qwen3_5_moe_text",
    parts={"visual.": "vision tower"},
)
