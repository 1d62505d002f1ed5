"""Staging of new weights on a thread of its own, one update after the other."""

import logging
import threading
from collections.abc import Callable
from queue import Full

import msgspec

from driver.errors import DriverError, InternalError, InvalidRequest, Overloaded
from driver.request import Notifying, ReturnChannel, UpdateMode, error_sample
from driver.stages.engine_protocol import Engine
from driver.stages.queues import TurnQueue
from engine.errors import ConfigurationError
from engine.live.staging import StagedWeights
from engine.live.weight_source import WeightSource

logger = logging.getLogger(__name__)

MAX_UPDATES = 4
"""Updates that wait for one that is being staged or written: each holds what it is to write."""


class WeightUpdate(msgspec.Struct, frozen=True):
    """An operator's order."""

    request_id: str
    source: WeightSource
    mode: UpdateMode
    keep_cache: bool
    name: str
    channel: ReturnChannel


class UpdateWeights(msgspec.Struct, frozen=True):
    """For the execution thread: write these weights; then answer the channel."""

    request_id: str
    order: WeightUpdate
    staged: StagedWeights
    channel: ReturnChannel


class WeightUpdates:
    """Reads the weights of one update at a time and checks them; ``post`` has them written.

    The next update is not staged before: the host holds one at most.
    """

    def __init__(self, engine: Engine, post: Callable[[UpdateWeights], None]) -> None:
        self._engine = engine
        self._post = post
        self._queue: TurnQueue[WeightUpdate] = TurnQueue(MAX_UPDATES, lambda _: ("", ""))
        self._written = threading.Event()

    def submit(self, update: WeightUpdate) -> None:
        """Queues an update. Raises Overloaded and QueueClosed, at once."""
        try:
            self._queue.put_nowait(update)
        except Full:
            raise Overloaded(f"{MAX_UPDATES} updates of the weights wait already: wait for their answers") from None

    def run(self) -> None:
        """Stages until ``close``."""
        self._queue.run(self._stage)

    def close(self) -> None:
        """Ends ``run``, and drops what is queued."""
        self._queue.close()
        self._written.set()

    def _stage(self, update: WeightUpdate) -> None:
        try:
            staged = self._engine.stage_weights(update.source)
        except ConfigurationError as refusal:
            self._refuse(update, InvalidRequest(str(refusal)))
        except Exception:
            logger.exception("weights could not be read", extra={"request_id": update.request_id})
            self._refuse(update, InternalError("a fault of the daemon: its log has the details"))
        else:
            channel = Notifying(update.channel, self._written.set)
            self._post(UpdateWeights(update.request_id, update, staged, channel))
            self._written.wait()
            self._written.clear()  # not before: ``close`` may have set it while this one was staged

    def _refuse(self, update: WeightUpdate, error: DriverError) -> None:
        logger.warning("weights are not updated: %s", error)
        update.channel.put(error_sample(update.request_id, error))
