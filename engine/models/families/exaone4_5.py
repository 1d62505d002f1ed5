"""EXAONE 4.5 with its vision tower, of which the text model is served: an EXAONE 4."""

from engine.models.family import Wrapper

FAMILY = Wrapper(
    "exaone4_5",
    "Exaone4_5_ForConditionalGeneration",
    text="exaone4",
    parts={"visual.": "vision tower", "mtp.": "layers that predict further tokens"},
)
