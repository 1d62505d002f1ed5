"""Between the first stage and the second, for requests that ask for structured outputs."""

from collections.abc import Callable

from driver.bounded_queue import BoundedQueue
from driver.errors import DriverError
from driver.grammars import Grammars
from driver.messages import Admit
from driver.open_requests import OpenRequests
from driver.stage import Stage

NUM_THREADS = 4
"""Grammars compiled at a time: a few that take their five seconds hold up neither the others nor the cores."""


class CompileGrammars:
    """Gives sequences their constraints and then admits them. Several threads ``run`` it, and wait for other processes.

    A grammar that cannot be compiled ends its client's request alone, whatever keeps it from that. At most ``max_queued`` wait, which is as many as
    may be open without running, so ``submit`` does not have to.
    """

    def __init__(
        self, grammars: Grammars, open_requests: OpenRequests, post: Callable[[Admit], None], max_queued: int
    ) -> None:
        self._grammars = grammars
        self._open_requests = open_requests
        self._post = post
        self._queue: BoundedQueue[Admit] = BoundedQueue(max_queued)
        self.stage = Stage("compile grammars", self._compile, self._fail, _source)

    def submit(self, admit: Admit) -> None:
        """Queues the sequences of a request, to be admitted when its grammar is compiled."""
        self._queue.put(admit)

    def close(self) -> None:
        """Ends ``run`` in all threads; what is queued is dropped."""
        self._queue.close()

    def run(self) -> None:
        """Compiles until the queue is closed."""
        self.stage.run(self._queue.get)

    def _compile(self, admit: Admit) -> None:
        params = admit.sequences[0].params
        assert params.structured_outputs is not None
        if not admit.opened.request.aborted:  # else the execution thread ends it as soon as it sees it
            try:
                constraints = self._grammars.compile(
                    params.structured_outputs, hide_eos=params.ignore_eos, count=len(admit.sequences)
                )
            except DriverError as error:
                self._fail(admit, error)
                return
            for sequence, constraint in zip(admit.sequences, constraints, strict=True):
                sequence.constraint = constraint
                if sequence.output_token_ids:
                    constraint.replay(sequence.output_token_ids)
                    sequence.awaits_mask = True
        self._post(admit)

    def _fail(self, admit: Admit, error: DriverError) -> None:
        for sequence in admit.sequences:
            if sequence.constraint is not None:
                sequence.constraint.close()
        self._open_requests.fail(admit.opened.request, error)


def _source(admit: Admit) -> tuple[str, str]:
    return admit.opened.request.source
