"""Gemma 4 Unified, which embeds images and sound without towers, of which the text model is served."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    text="gemma4_unified_text",
    parts={
        "vision_embedder.": "image embedder",
        "embed_vision.": "image projector",
        "embed_audio.": "audio projector",
    },
)
