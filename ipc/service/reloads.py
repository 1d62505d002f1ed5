"""What a running daemon reads again when it is told to: its configuration and the files of keys."""

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from driver.errors import InvalidRequest
from driver.request import ReturnChannel, done_sample, error_sample
from engine.errors import ConfigurationError
from ipc.errors import KeyFileError
from ipc.process.systemd import notify, notify_reloading

logger = logging.getLogger(__name__)


class Reloads:
    """The reloads that were asked for, each of all ``parts``.

    A part reads something again and says what has changed, if anything. It may raise
    ConfigurationError or KeyFileError, and has changed nothing then; the others are read all the
    same.
    """

    def __init__(self, parts: Sequence[Callable[[], str | None]]) -> None:
        self._parts = parts
        self._asked: SimpleQueue[tuple[str, ReturnChannel] | None] = SimpleQueue()
        """Who asked for a reload, None for a signal."""

    def ask(self, asker: tuple[str, ReturnChannel] | None = None) -> None:
        """Have one done; the asker's channel is told, by its request id. On any thread, or in a
        signal handler."""
        self._asked.put(asker)

    def run(self) -> None:
        """Do those that were asked for."""
        while not self._asked.empty():
            self._run(self._asked.get())

    def _run(self, asker: tuple[str, ReturnChannel] | None) -> None:
        notify_reloading()
        taken, wrong = [], []
        for reload in self._parts:
            try:
                taken.append(reload())
            except (ConfigurationError, KeyFileError) as error:
                wrong.append(f"not reloaded: {error}")
        reloaded = "; ".join(filter(None, taken))
        text = "; ".join([*wrong, f"reloaded: {reloaded}"] if reloaded else wrong)
        logger.log(logging.ERROR if wrong else logging.INFO, "%s", text)
        notify("READY=1")
        if asker is not None:
            request_id, channel = asker
            refusal = error_sample(request_id, InvalidRequest(text))
            channel.put(refusal if wrong else done_sample(request_id, text))
