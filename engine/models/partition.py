"""A model split over devices: each has its part of all heads, feed-forwards and vocabulary."""

from dataclasses import dataclass

from engine.devices.mesh import TP
from engine.errors import ConfigurationError
from engine.models.spec import ModelSpec
from engine.vocabulary import padded_vocab_size


@dataclass(frozen=True)
class Partition:
    """A model and the number of devices that it is split over. ``split`` checks both."""

    model: ModelSpec
    devices: int = 1

    @property
    def axis(self) -> str | None:
        """The mesh axis that the model is split over; None on one device."""
        return TP if self.devices > 1 else None

    @property
    def kv_replicas(self) -> int:
        """Devices with the same kv head, if there are too few; they split its query heads."""
        return max(1, self.devices // self.model.num_kv_heads)

    @property
    def stored_kv_heads(self) -> int:
        """kv heads on all devices together, replicas included."""
        return self.model.num_kv_heads * self.kv_replicas

    @property
    def kv_heads_each(self) -> int:
        """kv heads of one device."""
        return self.stored_kv_heads // self.devices

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of logits: whole sampler blocks on every device."""
        return padded_vocab_size(self.model.vocab_size, self.devices)


def split(model: ModelSpec, devices: int) -> Partition:
    """A model split over ``devices``. Raises ConfigurationError naming what does not divide."""
    if fault := _fault(model, devices):
        raise ConfigurationError(
            f"tensor_parallel_size {devices} does not divide {fault}; it can be {_listed(_divisors(model, devices))}"
        )
    return Partition(model, devices)


def most_devices(model: ModelSpec, devices: int) -> int:
    """The largest number, up to ``devices``, that a model can be split over."""
    return max(_divisors(model, devices))


def _divisors(model: ModelSpec, most: int) -> list[int]:
    return [count for count in range(1, most + 1) if _fault(model, count) is None]


def _fault(model: ModelSpec, devices: int) -> str | None:
    """The part of a model that cannot be split evenly, in words."""
    for block in model.blocks:
        for part in (*block.mixers, block.feed_forward):
            if part is not None and (fault := part.indivisible(devices)):
                return fault
    kv_heads = model.num_kv_heads
    if kv_heads % devices and devices % kv_heads:
        return f"the {kv_heads} kv heads, nor they it"
    return None


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
