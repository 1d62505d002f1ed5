"""Staging of weights on a thread of its own, one after the other: an update's, and those that a wake brings back."""

import logging
import threading
from collections.abc import Callable
from queue import Full

import msgspec

from driver.errors import DriverError, InvalidRequest, Overloaded
from driver.request import Notifying, ReturnChannel, UpdateMode, error_sample
from driver.stages.engine_protocol import Engine
from driver.stages.queues import TurnQueue
from driver.stages.stage import Stage
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


class FinishUpdate(msgspec.Struct, frozen=True):
    """For the execution thread (``EngineChanges``): write these weights; then answer the channel."""

    request_id: str
    order: WeightUpdate
    staged: StagedWeights
    channel: ReturnChannel


class RereadWeights(msgspec.Struct, frozen=True):
    """For the thread of weights: read those that were served before the engine slept, for a wake."""

    request_id: str
    channel: ReturnChannel
    pages: bool
    sleep: int
    """The number of the sleep that the wake is to end."""


class FinishWake(msgspec.Struct, frozen=True):
    """For the execution thread: write these weights, unless others came meanwhile, and wake; then answer the channel."""

    request_id: str
    order: RereadWeights
    staged: StagedWeights | None
    channel: ReturnChannel


class WeightUpdates:
    """Reads the weights of one order at a time and checks them; ``post`` has them written
    (``driver/operations/engine_changes.py``).

    The next ones are not staged before: the host holds one at most.
    """

    def __init__(self, engine: Engine, post: Callable[[FinishUpdate | FinishWake], None]) -> None:
        self._engine = engine
        self._post = post
        self._queue: TurnQueue[WeightUpdate | RereadWeights] = TurnQueue(MAX_UPDATES, lambda _: ("", ""))
        self._written = threading.Event()
        self.stage: Stage[WeightUpdate | RereadWeights] = Stage(
            "update weights", self._handle, self._refuse, lambda order: ("", order.request_id)
        )

    def submit(self, order: WeightUpdate | RereadWeights) -> None:
        """Queues an order. Raises Overloaded and QueueClosed, at once."""
        try:
            self._queue.put_nowait(order)
        except Full:
            raise Overloaded(f"{MAX_UPDATES} updates of the weights wait already: wait for their answers") from None

    def run(self) -> None:
        """Stages until ``close``."""
        self._queue.run(self.stage.work)

    def close(self) -> None:
        """Ends ``run``, and drops what is queued."""
        self._queue.close()
        self._written.set()

    def _handle(self, order: WeightUpdate | RereadWeights) -> None:
        try:
            message = self._staged(order)
        except ConfigurationError as refusal:
            self._refuse(order, InvalidRequest(str(refusal)))
        else:
            self._post(message)
            self._written.wait()
            self._written.clear()  # not before: ``close`` may have set it while this one was staged

    def _staged(self, order: WeightUpdate | RereadWeights) -> FinishUpdate | FinishWake:
        channel = Notifying(order.channel, self._written.set)
        if isinstance(order, WeightUpdate):
            return FinishUpdate(order.request_id, order, self._engine.stage_weights(order.source), channel)
        source = self._engine.missing_weights
        staged = None if source is None else self._engine.stage_weights(source)  # or others have come meanwhile
        return FinishWake(order.request_id, order, staged, channel)

    def _refuse(self, order: WeightUpdate | RereadWeights, error: DriverError) -> None:
        if isinstance(order, RereadWeights):
            logger.error("the weights cannot be read again, and the daemon sleeps on: %s", error)
            error = type(error)(f"the daemon sleeps on: {error}")
        else:
            logger.warning("weights are not updated: %s", error)
        order.channel.put(error_sample(order.request_id, error))
