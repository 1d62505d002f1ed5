"""The modules that a checkpoint of compressed-tensors was made for with inputs in 8 bits."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.models.requirements import require_expression
from engine.models.weights.sources.text_part import checkpoint_names

EXPRESSION = "re:"
"""Begins an entry that is matched from a name's beginning; others are names, or a class."""
LINEAR = "Linear"
"""The class of every module with a kernel."""


@dataclass(frozen=True)
class Int8Inputs:
    """Inputs that are quantised in each product, symmetrically, with a scale for each token."""

    groups: tuple[tuple[tuple[str, ...], bool], ...]
    """Of each group its targets, and whether their inputs are quantised so."""
    ignored: tuple[str, ...]
    """Entries as those of targets."""

    def __post_init__(self) -> None:
        """Raises UnsupportedError for an entry that is no expression."""
        for entry in (*self.ignored, *(target for targets, _ in self.groups for target in targets)):
            if entry.startswith(EXPRESSION):
                require_expression(entry.removeprefix(EXPRESSION), f"quantization_config has {entry[:80]!r}")

    def has(self, module: str) -> bool:
        """Whether a module has such inputs, by its name in the text model.

        Of several groups the one counts that names it most exactly: by its name, an expression, or
        its class.
        """
        names = checkpoint_names(module)
        if any(kind(entry, names) for kind in KINDS for entry in self.ignored):
            return False
        found = (has for kind in KINDS for targets, has in self.groups for entry in targets if kind(entry, names))
        return next(found, False)


def _is_name(entry: str, names: Collection[str]) -> bool:
    return entry in names


def _matches(entry: str, names: Collection[str]) -> bool:
    expression = entry.removeprefix(EXPRESSION)
    return expression != entry and any(re.match(expression, name) for name in names)


def _is_class(entry: str, names: Collection[str]) -> bool:  # noqa: ARG001
    return entry == LINEAR


KINDS: tuple[Callable[[str, Collection[str]], bool], ...] = (_is_name, _matches, _is_class)
"""The most exact first, as compressed-tensors orders targets."""
