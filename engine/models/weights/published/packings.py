"""How the numbers of each module are packed: GPTQModel's ``dynamic`` has other settings for some."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import require, require_expression, require_one_of
from engine.models.weights.sources.text_part import checkpoint_names

NOT_QUANTISED = "-:"
"""Begins an expression for modules that have plain weights."""
QUANTISED = "+:"
"""May begin any other."""


@dataclass(frozen=True)
class Packing:
    """Whole numbers of ``bits`` with a scale for each group of inputs."""

    bits: int
    group: int
    """-1 is all inputs."""

    @property
    def in_words(self) -> str:
        """For logs and status: nothing of groups that are all inputs."""
        return f" in groups of {self.group}" if self.group > 0 else ""


@dataclass(frozen=True)
class Packings:
    """The packing of every module."""

    usual: Packing
    others: tuple[tuple[str, Packing | None], ...]
    """By expressions for names of modules, the first that matches; None is not quantised."""

    def of(self, module: str) -> Packing | None:
        """That of a module, by its name in the text model; None if it is not quantised."""
        names = checkpoint_names(module)
        found = (packing for pattern, packing in self.others if any(re.match(pattern, name) for name in names))
        return next(found, self.usual)


class _Override(msgspec.Struct):
    """What ``dynamic`` may change for a module. Others of its keys say how numbers were found."""

    bits: int | None = None
    group_size: int | None = None
    format: str | None = None
    checkpoint_format: str | None = None
    method: str | None = None
    quant_method: str | None = None


def packings(
    usual: Packing, dynamic: Mapping[str, Any] | None, *, bits: tuple[int, ...], method: str, layout: str
) -> Packings:
    """With what ``dynamic`` says. Raises UnsupportedError for other numbers of bits, methods and layouts."""
    require_one_of("quantization_config's bits", usual.bits, bits)
    others: list[tuple[str, Packing | None]] = []
    for key, given in (dynamic or {}).items():
        pattern = key.removeprefix(NOT_QUANTISED).removeprefix(QUANTISED)
        require_expression(pattern, f"quantization_config's dynamic has {key[:80]!r}")
        if key.startswith(NOT_QUANTISED):
            others.append((pattern, None))
            continue
        override, where = msgspec.convert(given, _Override), f"quantization_config's dynamic {key[:80]!r}:"
        packing = Packing(override.bits or usual.bits, group_size(override.group_size or usual.group))
        require_one_of(f"{where} bits", packing.bits, bits)
        for stored in (override.format, override.checkpoint_format):
            require_one_of(f"{where} format", stored, (None, layout))
        for name in (override.method, override.quant_method):
            require_one_of(f"{where} quant_method", name, (None, method))
        others.append((pattern, packing))
    return Packings(usual, tuple(others))


def group_size(given: int) -> int:
    """The size of groups in a config. Raises UnsupportedError if there are no such groups."""
    require(
        given == -1 or 0 < given < 2**31, f"quantization_config's group_size {given} is not supported; -1 is all inputs"
    )
    return given
