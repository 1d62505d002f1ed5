"""The answers that are owed: to commands, and to questions to the tokenizer.

Each channel gets one sample, whatever happens. Several threads may deliver it: the one that does
the work, one that aborts it, and the one that ends the driver. Whoever removes the answer from the
table delivers it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from driver.errors import DriverError, DriverStopped
from driver.request import ReturnChannel, ReturnSample, error_sample
from driver.stages.queues import QueueClosed

logger = logging.getLogger(__name__)


class OwedAnswers:
    """The table of them; any thread may call any method."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._owed: set[_Answer] = set()
        self._why_closed: DriverError | None = None

    @contextmanager
    def owing(self, request_id: str, channel: ReturnChannel) -> Iterator[ReturnChannel]:
        """A block that hands the work to another thread, and the channel for its answer.

        Nothing is owed if the block raises; if the answer was given meanwhile, the exception is
        dropped instead. Raises DriverStopped after ``close``, and where the block raises
        QueueClosed.
        """
        answer = _Answer(request_id, channel, self)
        with self._changing:
            if self._why_closed is not None:
                raise DriverStopped(str(self._why_closed))
            self._owed.add(answer)
        try:
            yield answer
        except BaseException as error:
            if self.remove(answer):
                if isinstance(error, QueueClosed):
                    raise DriverStopped(str(self._why_closed)) from None
                raise

    def remove(self, answer: "_Answer") -> bool:
        """True for one caller only, who must deliver the answer, or raise."""
        with self._changing:
            if answer not in self._owed:
                return False
            self._owed.remove(answer)
            return True

    def close(self, why: DriverError) -> None:
        """Takes no more."""
        with self._changing:
            self._why_closed = why

    def fail_all(self, error: DriverError) -> None:
        """Gives all that are owed the same error."""
        with self._changing:
            owed, self._owed = self._owed, set()
        for answer in owed:
            try:
                answer.channel.put(error_sample(answer.request_id, error))
            except Exception:
                logger.exception("the answer to %r could not be delivered", answer.request_id)


class _Answer:
    """A channel for one sample; it drops others."""

    def __init__(self, request_id: str, channel: ReturnChannel, owed: OwedAnswers) -> None:
        self.request_id = request_id
        self.channel = channel
        self._owed = owed

    def put(self, sample: ReturnSample) -> None:
        """See ReturnChannel."""
        if self._owed.remove(self):
            self.channel.put(sample)
