"""All attacks, from the modules that have them."""

from scripts.benchmarks.hostile import control, flood, form, grammars, identity, keyed, web
from scripts.benchmarks.hostile.registry import ATTACKS

MODULES = (control, flood, form, grammars, identity, keyed, web)

__all__ = ["ATTACKS", "MODULES"]
