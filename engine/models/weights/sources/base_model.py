"""A checkpoint of a base model alone, as that of the model with a head."""

from dataclasses import dataclass

from engine.models.weights.sources.tensor_source import HEAD, RenamedTensors, TensorSource


@dataclass(frozen=True)
class BaseModel(RenamedTensors):
    """The tensors of a base model, with the prefix that they have beside a head."""

    prefix: str

    def renamed(self, name: str) -> str | None:
        """See RenamedTensors."""
        return name if name == HEAD else f"{self.prefix}{name}"


def with_prefix(source: TensorSource, prefix: str) -> TensorSource:
    """The source, all names but the head's beginning with the prefix; where one does, all have to."""
    return source if any(name.startswith(prefix) for name in source.names) else BaseModel(source, prefix)
