"""A driver for the socket tests: it does at once, on the socket thread, what three threads and a model would do."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from driver.adapters.commands import LoadAdapter, UnloadAdapter
from driver.adapters.registry import AdapterRegistry
from driver.errors import Draining, DriverError, InvalidRequest
from driver.metrics.request_listing import RequestRow
from driver.request import (
    ActiveRequest,
    RequestError,
    RequestOrder,
    ReturnChannel,
    ReturnSample,
    TokenizerRequest,
    UpdateMode,
    Usage,
)
from engine.adapters.adapter import Adapter
from engine.hub.roots import Root
from engine.live.weight_source import WeightSource
from engine.metrics.engine_stats import FIRST_VERSION
from engine.request_limits import MAX_MESSAGE_BYTES, ServingLimits
from ipc.process.logs import set_level
from ipc.server.driver_protocol import Driver
from ipc.server.zmq_server import Server
from ipc.sockets.auth import Authority
from ipc.wire.messages import CREDITS, PROTOCOL_VERSION, SILENCE_LIMIT, Welcome

PATIENCE = 300
"""Seconds after which a test takes something for never going to happen, on a machine that does other work, too."""


LIMITS = ServingLimits(max_model_len=256, vocab_size=257, eos_token_ids=(), max_num_seqs=4)


WELCOME = Welcome(PROTOCOL_VERSION, "parrot", 256, 257, 4, MAX_MESSAGE_BYTES, CREDITS, SILENCE_LIMIT, client_id="")


class FakeStatus(msgspec.Struct):
    open_requests: int
    state: str
    seconds_since_progress: float
    stages: dict[str, float]
    weight_version: int = FIRST_VERSION


class FakeDriver:
    """Echoes prompts. The words of a text come back as a piece each, with their lengths as token ids.

    A prompt of token ids, or a text that begins with "hold", is held open: the test says what comes back, with ``say``
    and ``finish``.
    """

    def __init__(self) -> None:
        self.submitted: list[ActiveRequest] = []
        self.held: SimpleQueue[ActiveRequest] = SimpleQueue()
        self.aborted: SimpleQueue[str] = SimpleQueue()
        self.refusal: DriverError | None = None
        self.refused: Counter[str] = Counter()
        self.open: dict[str, ActiveRequest] = {}
        self.when_drained: Callable[[], None] = lambda: None
        self.state = "serving"
        self.weight_versions: list[tuple[int, int]] = []
        """Of each answer."""
        self.weight_version = FIRST_VERSION
        """As its status tells it."""
        self.updates: list[tuple[WeightSource, UpdateMode, bool, str]] = []
        self.seconds_since_progress = 0.0
        self.adapters = AdapterRegistry(8, ("parrot",), lambda _: None)
        self._uids = itertools.count(1)
        self.tokenizer_info = {"tokenizer_class": "Words", "chat_template": None}

    @property
    def operations(self) -> "FakeDriver":
        """It does the operators' commands itself."""
        return self

    def submit_request(self, request: ActiveRequest) -> None:
        self.submitted.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.adapters.check(request.model, request.adapters)
        self.open[request.request_id] = request
        prompt = request.prompt if request.messages is None else request.messages[-1]["content"]
        if isinstance(prompt, list) or prompt.startswith("hold"):
            self.held.put(request)
        else:
            words = prompt.split()
            for word in words:
                self.say(request, word, [len(word)])
            self.finish(request, request.params.get("finish_reason", "stop"), len(words))

    def count_refusal(self, code: str) -> None:
        """By code."""
        self.refused[code] += 1

    def submit_tokenizer_request(self, request: TokenizerRequest) -> None:
        """A token for each word, by its length, and an x for each of its letters."""
        if self.refusal is not None:
            raise self.refusal
        self.adapters.check(request.model, request.adapters)
        words = (request.prompt or " ".join(str(message["content"]) for message in request.messages or [])).split()
        usage = Usage(len(request.token_ids or words), 0)
        sample = ReturnSample(request_id=request.request_id, finish_reason="stop", usage=usage)
        if request.token_ids is not None:
            sample = msgspec.structs.replace(sample, text=" ".join("x" * token_id for token_id in request.token_ids))
        else:
            sample = msgspec.structs.replace(sample, token_ids=[len(word) for word in words])
        request.channel.put(sample)

    def command_adapters(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Whatever path is asked for there is, but "bad"."""
        name = command.name
        if isinstance(command, UnloadAdapter):
            self.adapters.withdraw(name)
        else:
            self.adapters.check_name(name)
            self.adapters.check_loadable(name, replace=command.replace)
            if command.path == "bad":
                raise InvalidRequest("it is bad")
            path = command.path or name
            self.adapters.put(name, Adapter(next(self._uids), path, 8, ()), path, pin=command.pin)
        done = "loaded" if isinstance(command, LoadAdapter) else "unloaded"
        sample = ReturnSample(request_id=command.request_id, text=done, finish_reason="stop", usage=Usage(0, 0))
        command.channel.put(sample)

    def abort(self, request_id: str) -> bool:
        self.aborted.put(request_id)
        if request_id not in self.open:
            return False
        self.finish(self.open[request_id], "abort")
        return True

    def requests(self, order: RequestOrder, limit: int | None, client: str | None) -> tuple[list[RequestRow], int]:
        """The oldest first, whatever the order."""
        del order
        rows = [
            RequestRow(request.request_id, request.client, request.user, request.model, "decode", 1.0, 1, 0, 0.0)
            for request in self.open.values()
            if client in (None, request.client)
        ]
        return rows[:limit], len(rows)

    def reset_prefix_cache(self, request_id: str, channel: ReturnChannel) -> None:
        channel.put(ReturnSample(request_id=request_id, text="forgotten", finish_reason="stop", usage=Usage(0, 0)))

    def sleep(self, request_id: str, channel: ReturnChannel, level: int = 1) -> None:
        self.level = level
        self._fall("asleep", request_id, channel)

    def wake(self, request_id: str, channel: ReturnChannel, *, weights: bool = True, pages: bool = True) -> None:
        self._fall("serving" if weights and pages else "asleep", request_id, channel)

    def pause(self, request_id: str, channel: ReturnChannel, mode: UpdateMode, *, clear_cache: bool) -> None:
        self.paused_with = mode, clear_cache
        self._fall("paused", request_id, channel)

    def resume(self, request_id: str, channel: ReturnChannel) -> None:
        self._fall("serving", request_id, channel)

    def update_weights(
        self,
        request_id: str,
        channel: ReturnChannel,
        source: WeightSource,
        mode: UpdateMode,
        *,
        keep_cache: bool,
        name: str,
    ) -> None:
        self.updates.append((source, mode, keep_cache, name))
        version = len(self.updates) + 1
        usage = Usage(0, 0)
        channel.put(
            ReturnSample(
                request_id=request_id, text="new", finish_reason="stop", usage=usage, weight_versions=[(version, 0)]
            )
        )

    def _fall(self, state: str, request_id: str, channel: ReturnChannel) -> None:
        self.state = state
        channel.put(ReturnSample(request_id=request_id, text=state, finish_reason="stop", usage=Usage(0, 0)))

    def status(self) -> msgspec.Struct:
        return FakeStatus(len(self.open), self.state, self.seconds_since_progress, self.stages(), self.weight_version)

    def stages(self) -> dict[str, float]:
        return {"prepare": 0.0, "execution": self.seconds_since_progress}

    def stuck_requests(self, limit: float) -> list[str]:
        del limit
        return []

    def take(self) -> ActiveRequest:
        """The next request that is held open, when it has come."""
        return self.held.get(timeout=PATIENCE)

    def say(self, request: ActiveRequest, text: str, token_ids: list[int], **fields: Any) -> None:
        request.channel.put(ReturnSample(request_id=request.request_id, text=text, token_ids=token_ids, **fields))

    def finish(self, request: ActiveRequest, reason: str = "stop", num_tokens: int = 0) -> None:
        del self.open[request.request_id]
        usage = Usage(1, num_tokens)
        sample = ReturnSample(
            request_id=request.request_id, finish_reason=reason, usage=usage, weight_versions=self.weight_versions
        )
        request.channel.put(sample)
        if not self.open:
            self.when_drained()

    def drain(self, when_done: Callable[[], None]) -> None:
        self.refusal = Draining("enough")
        self.when_drained = when_done
        if not self.open:
            when_done()

    def start(self) -> None:
        """It has no threads to start."""

    def stop(self, why: str, timeout: float = 0.0) -> None:
        del timeout
        self._end("stopped", why)

    def fail(self, why: str, timeout: float = 0.0) -> None:
        del timeout
        self._end("internal", why)

    def _end(self, code: str, why: str) -> None:
        for request in self.open.values():
            error = RequestError(code, why)
            request.channel.put(ReturnSample(request_id=request.request_id, error=error))
        self.open.clear()


def build_server(
    address: str,
    on_failure: Callable[[str], None] = lambda why: None,
    authority: Authority | None = None,
    profiles: Path | None = None,
    weights_root: Root | None = None,
) -> Server:
    """A server that is not started yet, and that nobody drains or asks to reload."""
    return Server(
        address, on_failure, lambda timeout: None, lambda *asker: None, set_level, authority, profiles, weights_root
    )


@contextmanager
def serving(
    address: str,
    driver: Driver,
    model: str = "parrot",
    authority: Authority | None = None,
    metrics: Callable[[], str] = str,
    profiles: Path | None = None,
    aliases: Sequence[str] = (),
    defaults: dict[str, float] | None = None,
    enable_lora: bool = False,
    weights_root: Root | None = None,
    fingerprint: str = "",
) -> Iterator[Server]:
    """A server for the time of a with statement; it has not failed at its end."""
    failures: SimpleQueue[str] = SimpleQueue()
    server = build_server(address, failures.put, authority, profiles, weights_root)
    server.start()
    limits = msgspec.structs.replace(LIMITS, default_sampling_params=defaults or {})
    server.open(
        driver,
        model=model,
        limits=limits,
        metrics=metrics,
        aliases=aliases,
        enable_lora=enable_lora,
        fingerprint=fingerprint,
    )
    try:
        yield server
    finally:
        server.stop()
    assert failures.empty()
