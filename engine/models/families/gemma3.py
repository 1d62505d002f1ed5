"""Gemma 3 with its vision tower, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    text="gemma3_text",
    parts={"vision_tower.": "vision tower", "multi_modal_projector.": "image projector"},
    fixed={"final_logit_softcapping": None},
)
