"""Changes of the whole engine between two steps: pauses, sleep, and other weights.

While the engine is paused, or a change waits until no sequence is left, new sequences are held:
the engine does not know them, and they can end all the same.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from driver.errors import InvalidRequest, Overloaded
from driver.operations.weight_updates import FinishUpdate, FinishWake, RereadWeights
from driver.request import ReturnSample, UpdateMode, done_sample, error_sample
from driver.stages.engine_protocol import Engine
from driver.thread_messages import Change, PauseEngine, ResumeEngine, SleepEngine, WakeEngine
from engine.devices.device_errors import DeviceError
from engine.errors import ConfigurationError
from engine.scheduling.sequence import Sequence, SequenceOutput, SequenceStatus

logger = logging.getLogger(__name__)

KEEPS = "the daemon is paused, and requests that it keeps would never end: "
AWAITS_WEIGHTS = (
    "it serves again when an update brings all weights, as those before came as arrays and cannot be read again"
)


class EngineChanges:
    """A part of the execution thread. ``send`` has the tokens of landed steps delivered; ``end``
    ends a sequence with a finish reason."""

    def __init__(
        self, engine: Engine, send: Callable[[list[SequenceOutput]], None], end: Callable[[str, str], None]
    ) -> None:
        self._engine = engine
        self._send = send
        self._end = end
        self.paused = False
        """Whether the engine runs no step."""
        self._deferred: deque[PauseEngine | FinishUpdate] = deque()
        """Until the engine has no work left."""
        self._num_sleeps = 0
        self._held: dict[str, Sequence] = {}

    @property
    def state(self) -> str:
        """ "serving", "pausing" while open requests end first, or "paused"."""
        if self.paused:
            return "paused"
        return "pausing" if any(isinstance(change, PauseEngine) for change in self._deferred) else "serving"

    @property
    def held(self) -> list[Sequence]:
        """The sequences that are held; for any thread."""
        return list(self._held.values())

    def add(self, sequence: Sequence) -> None:
        """Give the engine a sequence, now or when it may begin."""
        if self.paused or self._deferred:
            self._held[sequence.request_id] = sequence
        else:
            self._engine.add(sequence)

    def finish_held(self, sequence_id: str) -> bool:
        """End a sequence that is held; False if it is none."""
        sequence = self._held.pop(sequence_id, None)
        if sequence is None:
            return False
        sequence.status = SequenceStatus.FINISHED
        if sequence.constraint is not None:
            sequence.constraint.close()
        return True

    def defer(self, change: Change) -> bool:
        """Whether a change waits until the engine has no work."""
        if not isinstance(change, PauseEngine | FinishUpdate) or _mode(change) != "wait":
            return False
        if self.paused or not (self._engine.has_work or self._deferred):
            return False
        self._deferred.append(change)
        return True

    def next_due(self) -> Change | None:
        """A change that has waited, if the engine has no work any more."""
        return self._deferred.popleft() if self._deferred and not self._engine.has_work else None

    def run(self, change: Change) -> ReturnSample | None:
        """Change the engine; returns the answer, or None if a FinishWake will have it. Raises what
        is a fault of the engine."""
        answer: ReturnSample | None
        match change:
            case SleepEngine():
                answer = self._sleep(change)
            case WakeEngine():
                answer = self._wake(change)
            case FinishWake():
                answer = self._finish_wake(change)
            case PauseEngine():
                answer = self._pause(change)
            case ResumeEngine():
                answer = self._resume(change)
            case FinishUpdate():
                answer = self._update(change)
        if not (self.paused or self._deferred):
            for sequence in self._held.values():
                self._engine.add(sequence)
            self._held.clear()
        return answer

    def _sleep(self, change: SleepEngine) -> ReturnSample:
        if change.cancelled:
            return error_sample(change.request_id, InvalidRequest("the daemon was woken before it slept"))
        self._engine.sleep(change.level)
        self._num_sleeps += 1
        return done_sample(change.request_id, "asleep")

    def _wake(self, change: WakeEngine) -> ReturnSample | None:
        if not change.weights or self._engine.missing_weights is None:
            self._engine.wake(pages=change.pages)
            return self._woken(change.request_id, weights=change.weights)
        try:
            change.read(RereadWeights(change.request_id, change.channel, change.pages, self._num_sleeps))
        except Overloaded as refusal:
            return error_sample(change.request_id, refusal)
        return None

    def _finish_wake(self, change: FinishWake) -> ReturnSample:
        order, staged = change.order, change.staged
        is_needed = order.sleep == self._num_sleeps and self._engine.missing_weights is not None
        if staged is not None and not is_needed:
            self._engine.discard_weights(staged)
        if order.sleep != self._num_sleeps:
            return error_sample(order.request_id, InvalidRequest("the daemon was sent to sleep again before it woke"))
        self._engine.wake(staged if is_needed else None, pages=order.pages)
        return self._woken(order.request_id, weights=True)

    def _woken(self, request_id: str, *, weights: bool) -> ReturnSample:
        stats = self._engine.stats()
        if weights and stats.awaits_weights:
            return done_sample(request_id, f"asleep: {AWAITS_WEIGHTS}")
        return done_sample(request_id, "asleep" if stats.asleep else "awake")

    def _pause(self, change: PauseEngine) -> ReturnSample:
        self._settle(abort=change.mode == "abort")
        self.paused = True
        if self._engine.has_work:
            self._refuse_deferred_updates()
        if change.clear_cache:
            self._engine.forget_cache()
        return done_sample(change.request_id, "paused")

    def _refuse_deferred_updates(self) -> None:
        """Those in mode wait, as ``_update`` would. Updates are done one after another, so that no other one would be
        done before the engine is resumed, and whoever resumes it may wait for such a one."""
        for update in [update for update in self._deferred if isinstance(update, FinishUpdate)]:
            self._deferred.remove(update)
            update.channel.put(self._update(update))

    def _resume(self, change: ResumeEngine) -> ReturnSample:
        for pause in [pause for pause in self._deferred if isinstance(pause, PauseEngine)]:
            self._deferred.remove(pause)
            pause.channel.put(error_sample(pause.request_id, InvalidRequest("the daemon was resumed before it paused")))
        self.paused = False
        return done_sample(change.request_id, "asleep" if self._engine.stats().asleep else "serving")

    def _update(self, change: FinishUpdate) -> ReturnSample:
        order, staged = change.order, change.staged
        if order.mode == "wait" and self._engine.has_work:
            return self._refused(change, f"{KEEPS}resume it, or update in mode keep")
        begun = time.monotonic()
        self._settle(abort=order.mode == "abort")
        try:
            self._engine.update_weights(staged, keep_cache=order.keep_cache, name=order.name)
        except ConfigurationError as refusal:
            return self._refused(change, str(refusal))
        except DeviceError as failure:
            lost = "the device failed while new weights were written, and has neither those nor the former ones"
            raise DeviceError(f"{lost}: a daemon that starts again serves those of its start ({failure})") from failure
        version, seconds = self._engine.stats().weight_version, time.monotonic() - begun
        what = f"version {version} of the weights: {staged.num_tensors} tensors from {staged.origin}"
        logger.info(
            "%s, written in %.3g s", what, seconds, extra={"weight_version": version, "weight_name": order.name}
        )
        return done_sample(change.request_id, what, weight_version=version)

    def _refused(self, change: FinishUpdate, why: str) -> ReturnSample:
        self._engine.discard_weights(change.staged)
        logger.warning("weights are not updated: %s", why)
        return error_sample(change.request_id, InvalidRequest(why))

    def _settle(self, *, abort: bool) -> None:
        """Have the tokens delivered that are in flight, and end all sequences if they are to."""
        outputs = self._engine.settle()
        if outputs:
            self._send(outputs)
        if abort:
            for sequence_id in (*self._engine.sequence_ids, *self._held):
                self._end(sequence_id, "abort")


def _mode(change: PauseEngine | FinishUpdate) -> UpdateMode:
    return change.mode if isinstance(change, PauseEngine) else change.order.mode
