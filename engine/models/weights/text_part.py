"""The text model of a checkpoint that has other parts, such as a vision tower."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from engine.models.weights.sources import TensorInfo, TensorSource

TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Of a text model's tensors beside other parts, as transformers 5 and 4 write them."""


@dataclass(frozen=True)
class TextPart:
    """The text model of a TensorSource with other parts, under the names it has by itself."""

    source: TensorSource
    unserved: tuple[tuple[str, str], ...]
    """Prefixes of the other parts, with their names."""

    @cached_property
    def _stored(self) -> dict[str, str]:
        others = tuple(f"{outer}{prefix}" for prefix, _ in self.unserved for outer in ("", "model."))
        return {text_name(name): name for name in self.source.names if not name.startswith(others)}

    @property
    def origin(self) -> str:
        """See TensorSource."""
        return self.source.origin

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        return self.source.info(self._stored[name])

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        return self.source.read(self._stored[name], index)


def text_name(name: str) -> str:
    """The name of a text model's tensor by itself, from that beside other parts."""
    for prefix, text in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name
