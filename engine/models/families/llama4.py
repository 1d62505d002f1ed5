"""Llama 4 with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "llama4",
    "Llama4ForConditionalGeneration",
    text="llama4_text",
    parts={"vision_model.": "vision tower", "multi_modal_projector.": "image projector"},
)
