"""What of an engine's memory is on the devices: pages and weights, and which weights they are."""

from typing import Any

from engine.live.live_weights import LiveWeights
from engine.live.staging import StagedWeights
from engine.live.weight_source import Rereadable
from engine.metrics.engine_stats import FIRST_VERSION
from engine.scheduling.scheduler import InferenceScheduler
from engine.step.compilation import counted_apart
from engine.step.runner import eSurgeRunner


class Residence:
    """Frees, allocates and replaces. The thread that steps the engine calls it, between steps: none
    may be in flight."""

    def __init__(self, scheduler: InferenceScheduler, runner: eSurgeRunner, weights: LiveWeights | None) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._weights = weights
        self._version, self._name = FIRST_VERSION, ""
        self.has_pages = True
        self._has_weights = True

    def free_pages(self) -> None:
        """Free the devices' memory. What is in the host's memory stays there, and is found again
        while the weights are the same. No sequence may wait or run."""
        self._scheduler.lose_cache(keep_host=True)
        self._runner.drop_cache()
        self.has_pages = False

    def free_weights(self) -> None:
        """Free the devices' memory, if they have weights."""
        if self._has_weights:
            self._runner.drop_weights()
            self._has_weights = False

    def replace_weights(self, staged: StagedWeights, name: str, *, keep_cache: bool) -> None:
        """Serve new weights from now on. Raises as ``oEngine.update_weights`` does."""
        self._runner.write_weights(staged)
        self._version += 1
        self._name, self._has_weights = name, True
        if keep_cache:
            self._scheduler.lose_logits()
        else:
            self.forget_cache()

    @property
    def missing_weights(self) -> Rereadable | None:
        """See oEngine."""
        return None if self._has_weights or self._weights is None else self._weights.again

    def wake(self, staged: StagedWeights | None, *, pages: bool) -> None:
        """Write the weights that were served, and allocate the pages again if they were freed.
        Raises as ``oEngine.wake`` does."""
        with counted_apart():
            if staged is not None:
                self.replace_weights(staged, self._name, keep_cache=False)
            if pages and not self.has_pages:
                self._runner.allocate_cache()
                self.has_pages = True

    def forget_cache(self) -> None:
        """Forget all that was computed: running sequences compute it again, and no prefix is
        found."""
        if self.has_pages:
            self._scheduler.lose_cache()
            self._runner.reset()
        else:
            self._scheduler.forget_all()

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "asleep": not (self.has_pages and self._has_weights),
            "weight_version": self._version,
            "weight_name": self._name,
            "has_pages": self.has_pages,
            "has_weights": self._has_weights,
            "awaits_weights": not self._has_weights and self._weights is not None and self._weights.again is None,
        }
