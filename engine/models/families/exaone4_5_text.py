"""EXAONE 4, by the name that EXAONE 4.5 first had for its text model."""

from engine.models.families.exaone4 import DEFAULTS, FIXED, Exaone4Fields, exaone4
from engine.models.family import Family

FAMILY = Family(
    "exaone4_5_text",
    "Exaone4ForCausalLM",
    exaone4,
    fields=Exaone4Fields,
    defaults=DEFAULTS,
    fixed=FIXED,
)
