"""The thread that loads and unloads adapters: it reads files, so that no other has to wait."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from queue import Full

from driver.adapters.commands import LoadAdapter, UnloadAdapter
from driver.adapters.registry import AdapterRegistry, check_name
from driver.errors import DriverError, InvalidRequest, Overloaded
from driver.request import done_sample, error_sample
from driver.stages.queues import BoundedQueue, TurnQueue
from driver.stages.stage import Stage
from driver.thread_messages import AddAdapter
from engine.adapters.adapter import Adapter, AdapterError
from engine.errors import ConfigurationError
from engine.hub.roots import OutsideRoot, Root

logger = logging.getLogger(__name__)

MAX_COMMANDS = 64
"""Commands that may wait: an operator's, each of which may read gigabytes."""


def check_first(
    modules: Mapping[str, str], root: Root | None, model_names: Collection[str], check: Callable[[str], None]
) -> None:
    """Raises ConfigurationError for adapters of the start that are seen to be at fault before the model is loaded, which
    may take minutes. ``check`` raises AdapterError for a directory."""
    for name, path in modules.items():
        with _of_start(name):
            check_name(name, model_names)
            check(_directory(path, root))


class AdapterLoader:
    """Does one command after another, in the order in which they came.

    ``read`` reads a directory, on any thread, and raises AdapterError; ``send`` brings what was read
    to other hosts. ``post`` puts an AddAdapter into the inbox of the execution thread. Only what is below ``root`` is read; without one
    nothing is loaded after the start.
    """

    def __init__(
        self,
        read: Callable[[str], Adapter],
        send: Callable[[Adapter], None],
        registry: AdapterRegistry,
        post: Callable[[AddAdapter], None],
        root: Root | None,
    ) -> None:
        self._read = read
        self._send = send
        self._registry = registry
        self._post = post
        self._root = root
        self._commands: TurnQueue[LoadAdapter | UnloadAdapter] = TurnQueue(MAX_COMMANDS, lambda _: ("", ""))
        self._answers: BoundedQueue[DriverError | None] = BoundedQueue(1)
        """The execution thread's to an AddAdapter."""
        self.stage: Stage[LoadAdapter | UnloadAdapter] = Stage(
            "load adapters", self._handle, self._fail, lambda command: ("", command.request_id)
        )

    def load_first(self, modules: Mapping[str, str], add: Callable[[Adapter], None]) -> None:
        """Load these directories, by name, before the threads start; they are pinned.

        They are below the root if there is one. ``add`` is the engine's. Raises ConfigurationError.
        """
        for name, path in modules.items():
            with _of_start(name):
                self._registry.check_name(name)
                self._registry.make_room(name)
                adapter = self._read(_directory(path, self._root))
                self._send(adapter)
                add(adapter)
            self._put(name, adapter, path, pin=True)

    def submit(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Queues it, from any thread. Raises InvalidRequest, Overloaded and QueueClosed."""
        if isinstance(command, LoadAdapter):
            self._registry.check_name(command.name)
            if self._root is None:
                raise InvalidRequest("adapters are loaded from below --adapter-root, which this daemon does not have")
        try:
            self._commands.put_nowait(command)
        except Full:
            raise Overloaded(f"{MAX_COMMANDS} adapters wait to be loaded already: try again later") from None

    def run(self) -> None:
        """Works until ``close``; one thread calls it."""
        self._commands.run(self.stage.work)

    def close(self) -> None:
        """Ends ``run``, once what it reads is read, and drops what is queued."""
        self._commands.close()
        self._answers.close()

    def _handle(self, command: LoadAdapter | UnloadAdapter) -> None:
        try:
            done = self._load(command) if isinstance(command, LoadAdapter) else self._unload(command)
        except DriverError as error:
            self._fail(command, error)
        else:
            command.channel.put(done_sample(command.request_id, done))

    def _fail(self, command: LoadAdapter | UnloadAdapter, error: DriverError) -> None:
        command.channel.put(error_sample(command.request_id, error))

    def _load(self, command: LoadAdapter) -> str:
        assert self._root is not None
        name, path = command.name, command.path or command.name
        self._registry.check_loadable(name, replace=command.replace)
        try:
            adapter = self._read(self._root.find(path))
        except (AdapterError, OutsideRoot, ConfigurationError) as error:
            raise InvalidRequest(f"the adapter {name} cannot be served: {error}") from error
        evicted = self._registry.make_room(name)
        self._send(adapter)
        self._post(AddAdapter(adapter, self._answers.put))
        refusal = self._answers.get()
        if refusal is not None:
            raise refusal
        gone = f"; evicted for it: {', '.join(evicted)}" if evicted else ""
        return self._put(name, adapter, path, pin=command.pin) + gone

    def _put(self, name: str, adapter: Adapter, path: str, *, pin: bool) -> str:
        self._registry.put(name, adapter, path, pin=pin)
        done = f"the adapter {name} is loaded: version {adapter.uid}, of rank {adapter.rank}"
        logger.info("%s, from %s", done, path)
        return done

    def _unload(self, command: UnloadAdapter) -> str:
        left = self._registry.withdraw(command.name)
        open_ones = f"; {left} open requests go on with it" if left else ""
        done = f"the adapter {command.name} is unloaded{open_ones}"
        logger.info("%s", done)
        return done


@contextmanager
def _of_start(name: str) -> Iterator[None]:
    """What is wrong with an adapter that an operator names for the start is wrong with the configuration."""
    try:
        yield
    except (DriverError, AdapterError, OutsideRoot, ConfigurationError) as error:
        raise ConfigurationError(f"lora_modules: {name}: {error}") from error


def _directory(path: str, root: Root | None) -> str:
    return path if root is None else root.find(path)
