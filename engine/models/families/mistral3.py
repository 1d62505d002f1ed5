"""Mistral Small 3.1 and 4, Ministral 3 and others with a vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    text="mistral",
    parts={"vision_tower.": "vision tower", "multi_modal_projector.": "image projector"},
)
