"""The text model of a checkpoint that has other parts, such as a vision tower."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.models.weights.sources.tensor_source import RenamedTensors

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Of a text model's tensors beside other parts, as transformers 5 and 4 write them."""


@dataclass(frozen=True)
class TextPart(RenamedTensors):
    """The text model of a TensorSource with other parts, under the names it has by itself."""

    unserved: tuple[tuple[str, str], ...]
    """Prefixes of the other parts, with their names."""

    def renamed(self, name: str) -> str | None:
        """See RenamedTensors."""
        return None if name.startswith(beginnings(self.unserved)) else text_name(name)


def beginnings(unserved: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Of the names of tensors and modules of a model's parts that are not served."""
    return tuple(f"{outer}{prefix}" for prefix, _ in unserved for outer in ("", "model."))


def checkpoint_names(name: str) -> tuple[str, ...]:
    """What a checkpoint may call a text model's tensor or module: alone, or beside other parts."""
    beside = (part + name.removeprefix(text) for part, text in TEXT_PREFIXES.items() if name.startswith(text))
    return name, *beside


def text_name(name: str) -> str:
    """The name of a text model's tensor by itself, from that beside other parts."""
    for prefix, text in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name
