"""A thread that reports its death."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class SafeThread:
    """Runs ``target``. An exception is logged, stored in ``error`` and passed to ``on_death``.

    ``target`` must be able to end: a thread cannot be killed. It is a daemon thread.
    """

    def __init__(self, name: str, target: Callable[[], None], on_death: Callable[[str, BaseException], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._target = target
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; once only."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds for the end; False if it still runs.

        Returns at once on the thread itself and before ``start``.
        """
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._target()
        except BaseException as error:  # no exception of a thread may pass unnoticed
            self.error = error
            logger.exception("thread %s died", self.name)
            self._on_death(self.name, error)
