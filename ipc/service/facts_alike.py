"""What must be equal on all hosts of a daemon, and is compared when they meet (engine/hosts/processes.py)."""

from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import msgspec

from engine.config import EngineConfig

EASYDEL = ("metadata.json", "tensorstore_index.json")
"""Files that say which of EasyDeL's checkpoints a directory has."""


def facts_alike(config: EngineConfig) -> dict[str, str]:
    """The facts that must be equal on all hosts of a daemon, by name. The names are the same whatever
    the settings: they are compared by their order."""
    settings = {
        f"--{field.name.replace('_', '-')}": str(getattr(config, field.name))
        for field in fields(config)
        if field.name
        not in (
            *("model", "served_model_name", "tokenizer", "chat_template", "process_id", "coordinator_address"),
            *("adapter_root", "lora_modules", "speculative_config"),
        )
    }
    speculation, of_draft_model = config.speculation, config.of_draft_model
    alike = speculation and msgspec.structs.replace(speculation, model=speculation.model and "...")
    settings["--speculative-config"] = str(alike)
    files = _facts_of_files(config.directory)
    draft = dict.fromkeys(files, "") if of_draft_model is None else _facts_of_files(of_draft_model.directory)
    beside = {f"{name} of the draft model": fact for name, fact in draft.items()}
    versions = {f"the version of {name}": version(name) for name in ("odriver", "jax", "jaxlib")}
    return {**settings, **versions, **files, **beside}


def _facts_of_files(directory: Path) -> dict[str, str]:
    files = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors*"))
    config_file = directory / "config.json"
    written = config_file.read_text() if config_file.is_file() else ""
    saved = [path.read_text() for name in EASYDEL for path in sorted(directory.glob(name))]
    return {"config.json": written, "the files of weights": str(files), "the checkpoint": "".join(saved)}
