"""Where the factors of an adapter's modules are among a model's weights."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from engine.adapters.adapter import AdapterError
from engine.adapters.peft import BASE, PeftConfig, namings_of, spellings, weight_name
from engine.adapters.slot_arrays import Slots
from engine.models.adapters.experts import AdaptedExpertsKernel
from engine.models.adapters.kernels import AdaptedKernel, AdaptedWeight
from engine.models.adapters.tables import AdaptedEmbedding, AdaptedHead


@dataclass(frozen=True)
class Place:
    """A module of a model, or one expert's part of a kernel."""

    weight: AdaptedWeight
    name: str
    """Of its factors (``AdaptedWeight.names``)."""
    shape: tuple[int, int]
    """[out, in], as a linear module's weight."""
    expert: int | None = None

    @property
    def is_embedding(self) -> bool:
        """Whether its factors are those of an embedding."""
        return isinstance(self.weight, AdaptedEmbedding)

    @property
    def is_router(self) -> bool:
        """Whether it is no linear module in transformers 5."""
        return self.weight.entry.parameter.exact


@dataclass(frozen=True)
class FusedPlace:
    """One tensor of all experts of a layer."""

    weight: AdaptedExpertsKernel
    parameter: str
    """Its name in transformers 5."""
    names: tuple[str, ...]
    """Of the factors of its parts."""


@dataclass
class Places:
    """All that may have adapters, by the names of weights."""

    without_room: frozenset[int]
    """The ids of weights that slots have no room for."""
    weights: dict[str, Place] = field(default_factory=dict)
    fused: dict[str, list[FusedPlace]] = field(default_factory=dict)
    """By the module of a layer's experts, its parameters in the order in which PEFT wraps them."""

    def of_module(self, origin: str, config: PeftConfig, module: str) -> tuple[str, Place | FusedPlace]:
        """The name that patterns are matched with, and the place of a module of the file.

        Raises AdapterError.
        """
        targets, place = config.targets, self.weights.get(weight_name(f"{module}.weight"))
        if place is not None:
            is_tied = config.ensure_weight_tying and isinstance(place.weight, AdaptedHead)
            if targets.names_module(module) or is_tied:
                return module, place
            if targets.names_parameter(f"{module}.weight"):
                return f"{module}.weight", place
            raise AdapterError(f"{origin}: {module} has tensors, and target_modules do not name it")
        container = module.split(BASE)[0]
        every = self.fused.get(weight_name(container))
        if every is None:
            raise AdapterError(f"{origin}: {module} is no module of this model that may have an adapter")
        wrapped = [one for one in every if targets.names_parameter(f"{container}.{one.parameter}")]
        depth = module.removeprefix(container).count(BASE)
        if depth >= len(wrapped):
            raise AdapterError(f"{origin}: {module} has tensors, and target_parameters do not name what they are for")
        fused = wrapped[len(wrapped) - 1 - depth]  # the one wrapped last is outermost
        return f"{container}.{fused.parameter}", fused

    def require_room(self, origin: str, module: str, place: Place | FusedPlace) -> None:
        """Raises AdapterError if the slots have no room for a place."""
        if id(place.weight) in self.without_room:
            raise AdapterError(f"{origin}: slots have no room for {module}: name it in lora_target_modules")

    def missing(self, config: PeftConfig, there: set[tuple[str, int | None]], modules: Iterable[str]) -> str | None:
        """Something that the configuration names and that is not among ``there``.

        These are names of factors, with an expert if it has factors by itself. The configuration
        names weights as they are called in the model whose ``modules`` the file has.
        """
        targets, called = config.targets, namings_of(f"{module.split(BASE)[0]}.weight" for module in modules)
        if config.ensure_weight_tying and (head := self._tied_head(there)) is not None:
            return head
        by_expert = any(expert is not None for _, expert in there)
        for weight, place in self.weights.items():
            if {(place.name, None), (place.name, place.expert)} & there or (place.expert is not None and not by_expert):
                continue
            names = called(weight)
            is_module = not (targets.names_all_linear and place.is_router)
            if is_module and any(targets.names_module(name.removesuffix(".weight")) for name in names):
                return weight.removesuffix(".weight")
            if place.expert is None and any(map(targets.names_parameter, names)):
                return weight
        for container, every in self.fused.items():
            for one in every:
                name = f"{container}.{one.parameter}"
                if not there.issuperset((part, None) for part in one.names) and any(
                    map(targets.names_parameter, called(name))
                ):
                    return name
        return None

    def _tied_head(self, there: set[tuple[str, int | None]]) -> str | None:
        """The head, if it is one table with the embedding, and of both this alone has an adapter."""
        tables = [one for one in self.weights.values() if isinstance(one.weight, AdaptedEmbedding | AdaptedHead)]
        paths = {one.weight.entry.path for one in tables if one.is_embedding and (one.name, None) in there}
        without = (one for one in tables if not one.is_embedding and (one.name, None) not in there)
        return next((one.name for one in without if one.weight.entry.path in paths), None)

    def unknown_parameter(self, config: PeftConfig) -> str | None:
        """One of ``target_parameters`` that names nothing here."""
        names = [*self.weights, *(f"{at}.{one.parameter}" for at, every in self.fused.items() for one in every)]
        spelled = [spelling for name in names for spelling in spellings(name)]
        for target in config.targets.target_parameters or ():
            if not any(name == target or name.endswith(f".{target}") for name in spelled):
                return target
        return None


def places_of(slots: Slots) -> Places:
    """The places of a model."""
    places = Places(frozenset(map(id, slots.without_room)))
    for weight in (*slots.kernels, *slots.without_room):
        for layer in weight.entry.sources:
            if isinstance(weight, AdaptedExpertsKernel):
                places.weights |= {weight_name(name): place for name, place in _by_expert(weight, layer)}
                one = FusedPlace(weight, weight.fused, weight.names(layer))
                every = places.fused.setdefault(weight_name(weight.container(layer)), [])
                every.insert(len(every) if weight.fused == "down_proj" else 0, one)
            elif isinstance(weight, AdaptedKernel):
                shapes = weight.shapes(layer)
                places.weights |= {weight_name(name): Place(weight, name, shape) for name, shape in shapes.items()}
    return places


def _by_expert(weight: AdaptedExpertsKernel, layer: int | None) -> Iterator[tuple[str, Place]]:
    names = weight.names(layer)
    for name, part, expert in weight.modules(layer):
        yield name, Place(weight, names[part], weight.shape, expert)
