"""Between the first stage and the second, for requests that ask for structured outputs."""

from collections.abc import Callable
from contextlib import suppress

from driver.bounded_queue import BoundedQueue, QueueClosed
from driver.errors import DriverError
from driver.grammars import Grammars
from driver.messages import Admit
from driver.open_requests import OpenRequests

NUM_THREADS = 4
"""Grammars compiled at a time: a few that take their five seconds hold up neither the others nor the cores."""


class CompileGrammars:
    """Gives sequences their constraints and then admits them. Several threads ``run`` it, and wait for other processes.

    A grammar that cannot be compiled ends its client's request alone. At most ``max_queued`` wait, which is as many as
    may be open without a token, so ``submit`` does not have to.
    """

    def __init__(
        self, grammars: Grammars, open_requests: OpenRequests, post: Callable[[Admit], None], max_queued: int
    ) -> None:
        self._grammars = grammars
        self._open_requests = open_requests
        self._post = post
        self._queue: BoundedQueue[Admit] = BoundedQueue(max_queued)

    def submit(self, admit: Admit) -> None:
        """Queues the sequences of a request, to be admitted when its grammar is compiled."""
        self._queue.put(admit)

    def close(self) -> None:
        """Ends ``run`` in all threads; what is queued is dropped."""
        self._queue.close()

    def run(self) -> None:
        """Compiles until the queue is closed."""
        with suppress(QueueClosed):
            while True:
                self._compile(self._queue.get())

    def _compile(self, admit: Admit) -> None:
        params = admit.sequences[0].params
        assert params.structured_outputs is not None
        if not admit.opened.request.aborted:  # else the execution thread ends it as soon as it sees it
            try:
                constraints = self._grammars.compile(
                    params.structured_outputs, hide_eos=params.ignore_eos, count=len(admit.sequences)
                )
            except DriverError as error:
                self._open_requests.fail(admit.opened.request, error)
                return
            for sequence, constraint in zip(admit.sequences, constraints, strict=True):
                sequence.constraint = constraint
                if sequence.output_token_ids:
                    constraint.replay(sequence.output_token_ids)
                    sequence.awaits_mask = True
        self._post(admit)
