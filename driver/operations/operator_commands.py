"""What operators have the driver do while it serves: each command is answered once, later."""

from collections.abc import Callable

import msgspec

from driver.adapters.commands import LoadAdapter, UnloadAdapter
from driver.availability import Availability
from driver.operations.weight_updates import WeightUpdate
from driver.owed_answers import OwedAnswers
from driver.request import Notifying, ReturnChannel, UpdateMode
from driver.thread_messages import Inbound, PauseEngine, ProfileEngine, ResetPrefixCache, ResumeEngine
from engine.live.weight_source import WeightSource


class OperatorCommands:
    """Any thread may call any method; none waits. A channel gets one sample: a result or an error.

    ``post`` puts a message into the inbox of the execution thread, ``load`` gives the thread of
    adapters a command, ``update`` the thread of weights one.
    """

    def __init__(
        self,
        owed_answers: OwedAnswers,
        availability: Availability,
        *,
        post: Callable[[Inbound], None],
        load: Callable[[LoadAdapter | UnloadAdapter], None],
        update: Callable[[WeightUpdate], None],
    ) -> None:
        self._owed_answers = owed_answers
        self._availability = availability
        self._post = post
        self._load = load
        self._update = update

    def sleep(self, request_id: str, channel: ReturnChannel, level: int = 1) -> None:
        """Refuses new requests; once none is open, frees the pages' memory, at level 2 the
        weights' too, and answers the channel.

        Raises Draining and DriverStopped at once, and InvalidRequest if it is paused and keeps
        requests.
        """
        with self._owed_answers.owing(request_id, channel) as answer:
            self._availability.sleep(request_id, answer, level)

    def wake(self, request_id: str, channel: ReturnChannel, *, weights: bool = True, pages: bool = True) -> None:
        """Allocates the memory again, reads the weights again, answers the channel, and serves
        when both are there. Raises as ``sleep`` does."""
        with self._owed_answers.owing(request_id, channel) as answer:
            self._availability.wake(request_id, answer, weights=weights, pages=pages)

    def pause(self, request_id: str, channel: ReturnChannel, mode: UpdateMode, *, clear_cache: bool) -> None:
        """Runs no step until ``resume``, and answers the channel once that is so. Requests that
        come meanwhile wait. Raises Draining and DriverStopped."""
        with self._owed_answers.owing(request_id, channel) as answer:
            self._availability.pause(PauseEngine(request_id, mode, clear_cache, answer))

    def resume(self, request_id: str, channel: ReturnChannel) -> None:
        """Runs steps again, and answers the channel. Raises DriverStopped."""
        with self._owed_answers.owing(request_id, channel) as answer:
            self._post(ResumeEngine(request_id, answer))

    def update_weights(
        self,
        request_id: str,
        channel: ReturnChannel,
        source: WeightSource,
        mode: UpdateMode = "keep",
        *,
        keep_cache: bool = False,
        name: str = "",
    ) -> None:
        """Has other weights served, between two steps, and answers the channel with their
        version, or with an error where the former ones are served on.

        Raises Overloaded and DriverStopped at once.
        """
        with self._owed_answers.owing(request_id, channel) as answer:
            answer = Notifying(answer, self._availability.updated)
            self._update(WeightUpdate(request_id, source, mode, keep_cache, name, answer))

    def reset_prefix_cache(self, request_id: str, channel: ReturnChannel) -> None:
        """Empties the prefix cache between two steps, and answers the channel. Raises
        DriverStopped."""
        with self._owed_answers.owing(request_id, channel) as answer:
            self._post(ResetPrefixCache(request_id, answer))

    def command_adapters(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Has an adapter loaded or unloaded, after the commands before; its channel is answered.

        Raises InvalidRequest, Overloaded, Draining and DriverStopped at once.
        """
        with self._owed_answers.owing(command.request_id, command.channel) as answer:
            self._availability.check_not_draining()
            self._load(msgspec.structs.replace(command, channel=answer))

    def profile(self, request_id: str, directory: str | None, channel: ReturnChannel) -> None:
        """Begins a trace of the process, for this directory, or ends and writes the one under way
        where it is None.

        The channel gets one sample: the directory as text, or an error. Raises DriverStopped.
        """
        with self._owed_answers.owing(request_id, channel) as answer:
            self._post(ProfileEngine(request_id, directory, answer))
