"""What drafts with the method mtp: a layer of the model's own checkpoint, or an assistant."""

from pathlib import Path

from engine.models.heads.assistant_config import read_assistant
from engine.models.heads.mtp_layer import mtp_head
from engine.models.spec import ModelSpec


def read_mtp(assistant: Path | None, model: ModelSpec, name: str) -> ModelSpec:
    """That of a model, which has a layer for it unless there is the directory of an ``assistant``.

    Raises ConfigurationError for what does not fit. ``name`` is the assistant's.
    """
    return mtp_head(model) if assistant is None else read_assistant(assistant, model, name)
