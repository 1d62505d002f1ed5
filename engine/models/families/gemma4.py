"""Gemma 4 with its vision and audio towers, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    text="gemma4_text",
    parts={
        "vision_tower.": "vision tower",
        "embed_vision.": "image projector",
        "audio_tower.": "audio tower",
        "embed_audio.": "audio projector",
    },
)
