"""Adapters that come and go while sequences have them, as an operator loads and removes them."""

from random import Random

from engine.scheduling.scheduler import InferenceScheduler
from scripts.benchmarks.histories.simulated_texts import SimulatedTexts

MOST_ADAPTERS = 5


class SimulatedAdapters:
    """The scheduler's, if it has slots for any; each that is loaded has a number of its own."""

    def __init__(
        self, scheduler: InferenceScheduler, texts: SimulatedTexts, random: Random, *, are_served: bool
    ) -> None:
        self._scheduler, self._texts, self._random = scheduler, texts, random
        self._count = 0
        self.loaded = [self._load() for _ in range(random.randint(1, MOST_ADAPTERS))] if are_served else []
        """Those that new requests may have."""

    def reload(self) -> None:
        """One is removed, whoever has it, and comes again as another."""
        if self.loaded:
            self._scheduler.adapters.remove(self.loaded.pop(self._random.randrange(len(self.loaded))))
            self.loaded.append(self._load())

    def forget(self) -> None:
        """As in oEngine: nothing is kept of adapters that are gone for good."""
        for uid in self._scheduler.adapters.take_forgotten():
            self._scheduler.memory.earlier.forget_adapter(uid)
            self._texts.forget_adapter(uid)

    def check_end(self) -> None:
        """No sequence is left: those are here that new requests may have."""
        left = [uid for uid in range(1, self._count + 1) if uid in self._scheduler.adapters]
        assert left == sorted(self.loaded), "a removed adapter is still here"

    def _load(self) -> int:
        self._count += 1
        self._scheduler.adapters.add(self._count)
        return self._count
