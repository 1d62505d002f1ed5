"""The driver's interface of an engine."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import Protocol

from engine.adapters.adapter import Adapter
from engine.live.staging import StagedWeights
from engine.live.weight_source import WeightSource
from engine.metrics.engine_stats import EngineStats
from engine.metrics.histogram import Histogram
from engine.request_limits import ServingLimits
from engine.scheduling.sequence import Sequence, SequenceOutput


class Engine(Protocol):
    """``oEngine``, or a fake one. One thread uses it."""

    @property
    def limits(self) -> ServingLimits:
        """The limits of a sequence; constant, so any thread may read them."""

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or a step is in flight on the device."""

    @property
    def seconds_to_spare(self) -> float:
        """For how long ``step`` is better not called, as the device has enough to do and others may come; 0 if now is
        the time."""

    def read_adapter(self, directory: str) -> Adapter:
        """Reads an adapter, from a directory or a bucket's; any thread may. Raises
        AdapterError."""

    def send_adapter(self, adapter: Adapter) -> None:
        """Brings an adapter to other hosts; any thread may, before ``add_adapter``."""

    def add_adapter(self, adapter: Adapter) -> None:
        """Serves it to sequences with its ``uid``. It was read here, so nothing is wrong with it."""

    def remove_adapter(self, uid: int) -> None:
        """Frees its memory, once the sequences that have it have ended; no other is added."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; never fails."""

    def finish(self, request_id: str) -> bool:
        """Ends a sequence early and frees its pages; False if it is unknown or has ended."""

    def step(self) -> list[SequenceOutput]:
        """Plans and dispatches one step, and returns the tokens of at most one earlier step."""

    def stats(self) -> EngineStats:
        """A snapshot."""

    @property
    def step_seconds(self) -> Mapping[str, Histogram]:
        """Seconds of each step, by phase; any thread may read them."""

    def earlier(self, sequence: Sequence) -> ListOf[int]:
        """Texts of earlier sequences that shared its prefix cache, with a negative token behind
        each; any thread may call it."""

    def reset_prefix_cache(self) -> int:
        """Forgets the contents of all pages, and earlier texts; how many pages had any."""

    def compile_staged(self, notify: Callable[[], None]) -> None:
        """Starts to compile the staged functions; ``notify`` asks, on any thread, for
        ``adopt``."""

    def adopt(self) -> None:
        """Uses the staged functions; raises the error of their compilation."""

    def sleep(self, level: int = 1) -> None:
        """Frees the pages' memory, and the weights' at level 2; no sequence may wait or run."""

    @property
    def missing_weights(self) -> WeightSource | None:
        """What to stage for ``wake``, if something can bring the weights that are not there; any
        thread may read it. Those that came as arrays have to be sent again: ``stats`` then says
        that it ``awaits_weights``."""

    def wake(self, staged: StagedWeights | None = None, *, pages: bool = True) -> None:
        """Takes that memory again, and has these weights in it."""

    @property
    def sequence_ids(self) -> list[str]:
        """Of the sequences that wait or run."""

    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Reads and checks new weights, on any thread; raises ConfigurationError."""

    def discard_weights(self, staged: StagedWeights) -> None:
        """Forgets weights that will not be written."""

    def settle(self) -> list[SequenceOutput]:
        """Waits for all steps in flight, and returns their tokens."""

    def update_weights(self, staged: StagedWeights, *, keep_cache: bool = False, name: str = "") -> None:
        """Serves these weights from the next step on, after ``settle``; raises ConfigurationError
        where nothing has changed."""

    def forget_cache(self) -> None:
        """Has running sequences compute all that they have again, and finds no prefix; after
        ``settle``."""

    def close(self) -> None:
        """Stops compiling."""
