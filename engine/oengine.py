"""The engine: sequences in, token ids out, a step at a time. One thread owns it.

What a failed step costs is in engine/step/failures.py.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from engine.adapters.adapter import Adapter, AdapterError
from engine.adapters.reader import AdapterReader
from engine.live.live_weights import LiveWeights
from engine.live.residence import Residence
from engine.live.staging import StagedWeights
from engine.live.weight_source import Rereadable, WeightSource
from engine.metrics.engine_stats import EngineStats
from engine.metrics.histogram import Histogram
from engine.metrics.step_log import StepLog
from engine.request_limits import ServingLimits
from engine.scheduling.preemption import PreemptionLog
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence, SequenceOutput
from engine.step.compilation import StagedCompilation, num_compilations
from engine.step.failures import MAX_FAILURES_IN_A_ROW, Failures
from engine.step.host_cache.host_link import host_link
from engine.step.runner import eSurgeRunner
from engine.step.steps_in_flight import StepsInFlight


class oEngine:
    """Joins scheduler and runner. ``run_ahead`` steps are in flight beyond the one being read."""

    def __init__(
        self,
        scheduler: InferenceScheduler,
        runner: eSurgeRunner,
        limits: ServingLimits,
        *,
        run_ahead: int,
        max_failures_in_a_row: int = MAX_FAILURES_IN_A_ROW,
        staged: StagedCompilation | None = None,
        replaced_kernels: int = 0,
        weights: LiveWeights | None = None,
        description: Mapping[str, str] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.limits = limits
        self.description = description or {}
        """The model and its device, in words by name."""
        self.fingerprint = fingerprint
        """What it shares with engines that make the same tokens of the same, but for rounding, by the weights of the
        start."""
        self._scheduler = scheduler
        self._runner = runner
        self._run_ahead = run_ahead
        self._replaced_kernels = replaced_kernels
        self._staged = staged or StagedCompilation([], publish=lambda: None)
        self._failures = Failures(scheduler, max_failures_in_a_row)
        self._log = StepLog()
        self._reader = None if runner.adapters is None else AdapterReader(runner.adapters)
        self._host = host_link(scheduler.memory.host, runner.host)
        self._residence = Residence(scheduler, runner, weights)
        self._in_flight = StepsInFlight(scheduler, runner, self._residence, self._failures, self._log, self._host)
        self._preemption_log = PreemptionLog(scheduler.memory.num_pages, scheduler.memory.page_size)
        self.start_counting()

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._scheduler.memory.page_size

    @property
    def num_page_tables(self) -> int:
        """Groups of layers, in each of which a sequence has pages."""
        return len(self._scheduler.memory.groups.windows)

    def start_counting(self) -> None:
        """Reset the counts of ``stats``. From here on every unplanned compilation counts."""
        self._compilations_at_ready = num_compilations()
        self._runner.gaps.start_counting()
        self._log.start_counting()
        self._failures.start_counting()

    @property
    def step_seconds(self) -> Mapping[str, Histogram]:
        """Of each step that landed, by phase; one thread writes them, and any may read."""
        return self._log.seconds

    def compile_staged(self, notify: Callable[[], None]) -> None:
        """Begin to compile what readiness did not wait for.

        Another thread calls ``notify``. After each call, call ``adopt``.
        """
        self._staged.begin(notify)

    def adopt(self) -> None:
        """Use the functions compiled so far. Raises the error of a failed compilation."""
        self._staged.adopt()

    def sleep(self, level: int = 1) -> None:
        """Free the pages' memory, and at level 2 the weights'. No sequence may wait or run.

        What is in the host's memory stays there, and is found again while the weights are the same.
        """
        if self._residence.has_pages:
            self.settle()
            assert not self.has_work, "a sequence waits or runs"
            self._in_flight.finish_copies()
            self._residence.free_pages()
        if level > 1:
            self._residence.free_weights()

    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Read new weights into the hosts' memory, and check them; on any thread.

        They are then to be written or discarded. Raises ConfigurationError, and nothing has
        changed.
        """
        return self._runner.stage_weights(source)

    def discard_weights(self, staged: StagedWeights) -> None:
        """Forget weights that will not be written."""
        self._runner.discard_weights(staged)

    def settle(self) -> list[SequenceOutput]:
        """Wait for the steps in flight; returns their tokens. Raises as ``step`` does."""
        outputs = []
        while self._in_flight:
            outputs += self._in_flight.land()
        self._runner.gaps.rest()  # a pause is no gap
        return outputs

    def update_weights(self, staged: StagedWeights, *, keep_cache: bool = False, name: str = "") -> None:
        """Serve new weights from the next step on; ``settle`` first.

        Unless ``keep_cache``, running sequences compute all that they have again, and nothing
        that the former weights computed is found. In any case nobody samples any more from logits
        that they have computed. Raises ConfigurationError before anything is
        written, and DeviceError where the device fails: the weights are lost then.
        """
        assert not self._in_flight, "a step reads the weights"
        self._residence.replace_weights(staged, name, keep_cache=keep_cache)
        self._in_flight.forget_logits()

    def forget_cache(self) -> None:
        """Forget all that was computed: running sequences compute it again, and no prefix is
        found. No step may be in flight."""
        self._residence.forget_cache()

    def earlier(self, sequence: Sequence) -> ListOf[int]:
        """Texts of earlier sequences of its salt, NO_DRAFT behind each; on any thread."""
        return self._scheduler.memory.earlier.of(sequence)

    def reset_prefix_cache(self) -> int:
        """Forget the contents of all pages, and earlier texts; returns how many pages had any.
        Sequences keep theirs."""
        return self._scheduler.forget_all()

    @property
    def missing_weights(self) -> Rereadable | None:
        """What to stage for ``wake``; None if the weights are there, or came as arrays: then an
        update has to bring all (``stats().awaits_weights``). On any thread."""
        return self._residence.missing_weights

    def wake(self, staged: StagedWeights | None = None, *, pages: bool = True) -> None:
        """Serve the weights that were served, and allocate the pages again if they were freed.

        Raises ConfigurationError as ``update_weights`` does, and jax.errors.JaxRuntimeError if the
        device has no memory.
        """
        self._residence.wake(staged, pages=pages)

    def read_adapter(self, directory: str) -> Adapter:
        """The adapter in a local directory or one of a bucket (``gs://``), for ``send_adapter``.

        On any thread: it touches nothing of the engine. Raises AdapterError if it cannot be served.
        """
        if self._reader is None:
            raise AdapterError("this engine serves no adapters: set enable_lora")
        return self._reader.read(directory)

    def send_adapter(self, adapter: Adapter) -> None:
        """Bring an adapter to the engine's other hosts, for ``add_adapter``, which then must follow.

        On any thread: no step waits for its bytes. Raises HostsError if a host has gone.
        """
        self._runner.send_adapter(adapter)

    def add_adapter(self, adapter: Adapter) -> None:
        """Serve sequences whose ``adapter_id`` is the adapter's ``uid``."""
        self._scheduler.adapters.add(adapter.uid)
        self._runner.add_adapter(adapter)

    def remove_adapter(self, uid: int) -> None:
        """Forget an adapter, and free its memory, when no sequence that has it waits or runs."""
        self._scheduler.adapters.remove(uid)
        self._drop_adapters()

    def close(self) -> None:
        """Stop compiling."""
        self._staged.close()

    @property
    def sequence_ids(self) -> list[str]:
        """Of the sequences that wait or run."""
        return self._scheduler.sequence_ids

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or a step is in flight."""
        return bool(self._in_flight) or self._scheduler.has_sequences

    @property
    def seconds_to_spare(self) -> float:
        """For how long ``step`` is better not called, so that who comes meanwhile is in the next one; 0 if the device
        may soon have nothing to do."""
        return self._in_flight.seconds_to_spare

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is within ``limits``.

        Raises AdapterError if its adapter is not here, or not any more.
        """
        if sequence.adapter_id and sequence.adapter_id not in self._scheduler.adapters:
            raise AdapterError("the adapter of this request is not loaded any more")
        if not self.has_work:
            self._runner.gaps.rest()
        self._scheduler.add(sequence)
        if sequence.awaits_mask:
            self._in_flight.await_mask(sequence)

    def finish(self, request_id: str) -> bool:
        """End a sequence now and free its pages; False if it has ended already."""
        ended = self._scheduler.finish(request_id)
        self._in_flight.forget_logits()
        self._drop_adapters()
        return ended

    def step(self) -> list[SequenceOutput]:
        """Plan and dispatch a step; collect the oldest if enough are in flight or none is planned.

        Rows whose masks have come sample before it, as it reads their tokens. Raises DeviceError if
        too many steps in a row have failed.
        """
        outputs = self._in_flight.resume()
        if not self._in_flight.sample_late():
            outputs += self._step()
        while self._in_flight.last_has_failed:
            outputs += self._in_flight.land()
        self._drop_adapters()
        return outputs

    def _step(self) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        if self._host is not None:
            self._host.land()
        now = time.monotonic()
        plan = self._scheduler.plan(now)
        planning = time.monotonic() - now
        if self._scheduler.preempted:
            self._preemption_log.tell(self._scheduler.take_preempted(), self._scheduler.num_running, now)
        if plan is not None:
            self._in_flight.dispatch(plan, planning)
        if plan is None or not plan.num_rows:
            outputs += self._in_flight.land()
        while self._in_flight.num_steps > self._run_ahead:
            outputs += self._in_flight.land()
        return outputs

    def check_integrity(self) -> None:
        """Assert that no page or slot is lost or owned twice."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """The counters and gauges of this moment."""
        return EngineStats(
            max_num_seqs=self.limits.max_num_seqs,
            compilations_after_ready=num_compilations() - self._compilations_at_ready,
            replaced_kernels=self._replaced_kernels,
            **self._scheduler.stats(),
            **self._runner.gaps.stats(),
            **self._log.stats(),
            **self._failures.stats(),
            **self._staged.stats(),
            **self._residence.stats(),
            **({} if self._host is None else self._host.stats()),
        )

    def _drop_adapters(self) -> None:
        """Free the host memory of adapters that no sequence has any more."""
        for uid in self._scheduler.adapters.take_forgotten():
            self._runner.remove_adapter(uid)
            self._scheduler.memory.earlier.forget_adapter(uid)
