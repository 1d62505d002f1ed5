"""The modules and parameters that an adapter's configuration names, by the rules of PEFT.

``target_modules`` are ends of names, an expression for whole names, or "all-linear", less
``exclude_modules``; with ends that are no whole names, as ``lm_head`` is, ``layers_to_transform`` are
the layers. ``target_parameters`` are ends of names.
"""

from collections.abc import Iterable

import msgspec

from engine.adapters.patterns import matched

ALL_LINEAR = "all-linear"
TABLES = ("embed_tokens", "lm_head", "embed_in", "embed_out", "wte")
"""Ends of the modules that "all-linear" leaves out."""


class Targets(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that names what is adapted."""

    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    target_parameters: list[str] | None = None

    @property
    def expressions(self) -> list[str]:
        """What is to be compiled, one by one."""
        whole = [one for one in (self.target_modules, self.exclude_modules) if isinstance(one, str)]
        return [*(one for one in whole if not self._is_all_linear(one)), *_several(self.layers_pattern)]

    @property
    def names_all_linear(self) -> bool:
        """Whether all linear modules are named, whatever they are called."""
        return isinstance(self.target_modules, str) and self._is_all_linear(self.target_modules)

    def names_module(self, module: str) -> bool:
        """Whether a module is adapted, such as ``model.layers.0.self_attn.q_proj``."""
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return False
        if self.names_all_linear:
            return module.rpartition(".")[2] not in TABLES
        if not self.target_modules or not _matches(self.target_modules, module):
            return False
        layers = self.layers_to_transform
        if isinstance(self.target_modules, str) or layers is None or layers == [] or module in self.target_modules:
            return True
        layer = self._layer(module)
        return layer is not None and layer in ([layers] if isinstance(layers, int) else layers)

    def names_parameter(self, name: str) -> bool:
        """Whether a parameter is adapted, such as ``model.layers.0.mlp.experts.gate_up_proj``."""
        return _ends(self.target_parameters or (), name)

    def _layer(self, module: str) -> int | None:
        """The number of a module's layer, the first in its name."""
        patterns = _several(self.layers_pattern) or [r"[^.]*"]
        found = (matched(rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\.", module) for pattern in patterns)
        match = next((one for one in found if one is not None), None)
        return None if match is None else int(match["layer"])

    @staticmethod
    def _is_all_linear(modules: str) -> bool:
        return modules.lower() == ALL_LINEAR


def _matches(modules: list[str] | str, name: str) -> bool:
    return matched(modules, name, whole=True) is not None if isinstance(modules, str) else _ends(modules, name)


def _ends(ends: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _several(given: list[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) and given else list(given or ())
