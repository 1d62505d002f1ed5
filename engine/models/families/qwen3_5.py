"""Qwen 3.5 with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    text="qwen3_5_text",
    parts={"visual.": "vision tower"},
)
