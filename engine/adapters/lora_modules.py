"""The adapters that an operator names for the start."""

from collections.abc import Iterable

import msgspec

from engine.errors import ConfigurationError


def paths_by_name(modules: Iterable[str]) -> dict[str, str]:
    """The paths of ``lora_modules``, each NAME=PATH or an object in JSON. Raises ConfigurationError."""
    paths: dict[str, str] = {}
    for module in modules:
        name, path = _parse(module)
        if not (name and path) or name in paths:
            raise ConfigurationError(
                f'lora_modules must be NAME=PATH or {{"name": NAME, "path": PATH}}, each name once, not {module!r}'
            )
        paths[name] = path
    return paths


class _LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    """One of ``lora_modules`` as JSON, in vLLM's form."""

    name: str
    path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if self.base_model_name is not None:
            raise ValueError("base_model_name must be left out: it is always the model that is served")


def _parse(given: str) -> tuple[str, str]:
    """The name and the path, either empty if it has none. Raises ConfigurationError."""
    if not given.lstrip().startswith("{"):
        name, _, path = given.partition("=")
        return name, path
    try:
        module = msgspec.json.decode(given, type=_LoraModule)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"lora_modules: {given}: {error}") from error
    return module.name, module.path
