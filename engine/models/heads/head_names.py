"""Draft heads and assistants by name alone: another model is refused in their place before JAX is imported."""

from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError
from engine.models.weights.sources.checkpoint import config_file, read_json

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Of the authors and SpecForge; of vLLM; of vLLM's speculators, first and later."""
ASSISTANT, UNIFIED_ASSISTANT = "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"


def check_head(directory: Path) -> None:
    """Raises ConfigurationError for a directory that has no config.json of a draft head."""
    path, named = _architectures(directory, "a draft head")
    if not any(name in ARCHITECTURES for name in named):
        raise ConfigurationError(
            f"{path}: architectures {named} are of no draft head of EAGLE-3, which are {', '.join(ARCHITECTURES)}; a model "
            "of its own drafts with the method draft_model"
        )


def check_assistant(directory: Path) -> None:
    """Raises ConfigurationError for a directory that has no config.json of an assistant of Gemma 4."""
    path, named = _architectures(directory, "an assistant of Gemma 4")
    if UNIFIED_ASSISTANT in named:
        raise ConfigurationError(f"{path}: {UNIFIED_ASSISTANT}, the assistant of Gemma 4 Unified, is not supported")
    if ASSISTANT not in named:
        raise ConfigurationError(
            f"{path}: architectures {named} are of no assistant of Gemma 4, which is {ASSISTANT}, and beside the method mtp "
            "model names such alone: leave it out to draft with a layer of the model's own checkpoint"
        )


def _architectures(directory: Path, kind: str) -> tuple[Path, list[Any]]:
    """A directory's config.json, and the architectures in it."""
    path = config_file(directory, kind)
    given = read_json(path, dict[str, Any]).get("architectures")
    return path, given if isinstance(given, list) else []
