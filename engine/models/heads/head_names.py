"""Draft heads by name alone: another model is refused in their place before JAX is imported."""

from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError
from engine.models.weights.sources import read_json

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Of the authors and SpecForge; of vLLM; of vLLM's speculators, first and later."""


def check_head(directory: Path) -> None:
    """Raises ConfigurationError for a directory that has no config.json of a draft head."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} has no config.json: give the directory of a draft head")
    given = read_json(path, dict[str, Any]).get("architectures")
    named = given if isinstance(given, list) else []
    if not any(name in ARCHITECTURES for name in named):
        raise ConfigurationError(
            f"{path}: architectures {named} are of no draft head of EAGLE-3, which are {', '.join(ARCHITECTURES)}; a model "
            "of its own drafts with the method draft_model"
        )
