"""An engine and a tokenizer that one can compute in one's head, for tests of the real threads and queues."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from types import SimpleNamespace
from typing import Any

import numpy as np

from driver.text.conversation import Chat
from engine.adapters.adapter import Adapter, AdapterError
from engine.devices.device_errors import DeviceError
from engine.errors import ConfigurationError
from engine.live.weight_source import StartWeights, WeightArrays, WeightSource
from engine.metrics.engine_stats import EngineStats
from engine.request_limits import ServingLimits
from engine.scheduling.sequence import Sequence, SequenceOutput, SequenceStatus, TokenLogprobs
from engine.step.timing.step_times import step_histograms

EOS = 256
VOCAB_SIZE = 257


class FakeTokenizer:
    """A token per UTF-8 byte, and EOS; a chat is ``role: content`` lines."""

    eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_word(self, text: str) -> list[int]:
        return self.encode(text)

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def render(self, chat: Chat) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in chat.messages) + "assistant: "

    def decode(self, token_ids: Tokens[int], *, skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else b"<end>"
        pieces = [bytes([token_id]) if self.is_visible(token_id) else end for token_id in token_ids]
        return b"".join(pieces).decode(errors="replace")

    def text_of(self, token_id: int) -> str:
        """Each has its own."""
        return self.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id])

    def has_id(self, token_id: int) -> bool:
        return token_id < VOCAB_SIZE

    def is_visible(self, token_id: int) -> bool:
        return token_id < EOS

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": "FakeTokenizer", "eos_token": "<end>", "chat_template": None}

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


class FakeEngine:
    """A parrot: the output is the prompt, over and over, until a stop token of it or ``max_tokens``.

    A step dispatches a token for each of the first ``max_num_seqs`` sequences, or as many as ``counts`` says next, and
    lands what the step before dispatched, so a sequence that ends early has tokens too many in flight; this engine hands
    them out, late.
    ``gate``, if given, is acquired once a step. Step number ``fails_at`` raises.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 256,
        gate: threading.Semaphore | None = None,
        fails_at: int | None = None,
    ) -> None:
        self.limits = ServingLimits(
            max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), max_num_seqs=max_num_seqs
        )
        self.step_seconds = step_histograms()
        self.num_kept_pages = 0
        self.steps = 0
        self.asleep = False
        self.has_weights, self.weight_version, self.unreadable = True, 1, ""
        self.may_stage = threading.Event()
        self.may_stage.set()
        self.were_arrays, self.breaks = False, False
        self.staged: list[WeightSource] = []
        self.discarded: list[WeightSource] = []
        self.written: list[tuple[Any, bool, str]] = []
        self.admitted: list[Sequence] = []
        self.adapters: dict[int, Adapter] = {}
        self._uids = itertools.count(1)
        self._max_num_seqs = max_num_seqs
        self._gate = gate
        self._fails_at = fails_at
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}
        self._in_flight: list[tuple[Sequence, list[int]]] = []
        self.counts: Iterator[int] = itertools.repeat(1)
        """Tokens of the next outputs, until one ends its sequence."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._in_flight)

    @property
    def seconds_to_spare(self) -> float:
        return 0.0

    def read_adapter(self, directory: str) -> Adapter:
        """Of rank 1, with a byte; one whose directory is called "bad" cannot be served."""
        if directory.endswith("bad"):
            raise AdapterError("it is bad")
        return Adapter(next(self._uids), directory, 1, (np.zeros(1, np.int8),))

    def send_adapter(self, adapter: Adapter) -> None:
        """There are no other hosts."""

    def add_adapter(self, adapter: Adapter) -> None:
        self.adapters[adapter.uid] = adapter

    def remove_adapter(self, uid: int) -> None:
        del self.adapters[uid]

    def add(self, sequence: Sequence) -> None:
        if sequence.adapter_id and sequence.adapter_id not in self.adapters:
            raise AdapterError(f"adapter {sequence.adapter_id} is not there")
        self.admitted.append(sequence)
        self._waiting.append(sequence)

    def finish(self, request_id: str) -> bool:
        for sequence in (*self._waiting, *self._running.values()):
            if sequence.request_id == request_id:
                self._end(sequence)
                return True
        return False

    def step(self) -> list[SequenceOutput]:
        assert self.has_work, "step() was called with nothing to do"
        assert not self.asleep, "a step without pages"
        if self._gate is not None:
            self._gate.acquire()
        self.steps += 1
        if self.steps == self._fails_at:
            raise RuntimeError("the device is on fire")
        landing, self._in_flight = self._in_flight, self._dispatch()
        return [self._land(sequence, token_ids) for sequence, token_ids in landing]

    def compile_staged(self, notify: Callable[[], None]) -> None:
        """Everything is there from the start."""

    def adopt(self) -> None:
        """Nothing ever comes."""

    def sleep(self, level: int = 1) -> None:
        self._in_flight = []
        assert not self.has_work, "a sequence waits or runs"
        self.asleep = True
        self.has_weights = self.has_weights and level == 1

    @property
    def missing_weights(self) -> WeightSource | None:
        return None if self.has_weights or self.were_arrays else StartWeights()

    def wake(self, staged: Any = None, *, pages: bool = True) -> None:
        self.has_weights = self.has_weights or staged is not None
        self.asleep = self.asleep and not pages

    @property
    def sequence_ids(self) -> list[str]:
        return [sequence.request_id for sequence in (*self._waiting, *self._running.values())]

    def stage_weights(self, source: WeightSource) -> Any:
        self.staged.append(source)
        self.may_stage.wait()
        if self.unreadable:
            raise ConfigurationError(self.unreadable)
        return SimpleNamespace(origin="a test", num_tensors=1, source=source)

    def discard_weights(self, staged: Any) -> None:
        self.discarded.append(staged.source)

    def settle(self) -> list[SequenceOutput]:
        landing, self._in_flight = self._in_flight, []
        return [self._land(sequence, token_ids) for sequence, token_ids in landing]

    def update_weights(self, staged: Any, *, keep_cache: bool = False, name: str = "") -> None:
        assert not self._in_flight, "a step reads the weights"
        if self.breaks:
            raise DeviceError("INTERNAL: a wire has come loose")
        self.weight_version += 1
        self.has_weights = True
        self.were_arrays = isinstance(staged.source, WeightArrays)
        self.written.append((staged, keep_cache, name))

    def forget_cache(self) -> None:
        assert not self._in_flight
        self.num_kept_pages = 0

    def earlier(self, sequence: Sequence) -> list[int]:  # noqa: ARG002 - nobody has any
        """It keeps no texts."""
        return []

    def reset_prefix_cache(self) -> int:
        kept, self.num_kept_pages = self.num_kept_pages, 0
        return kept

    def close(self) -> None:
        """Nothing is under way."""

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            max_num_seqs=self.limits.max_num_seqs,
            waiting=len(self._waiting),
            steps=self.steps,
            asleep=self.asleep or not self.has_weights,
            has_pages=not self.asleep,
            has_weights=self.has_weights,
            awaits_weights=self.were_arrays and not self.has_weights,
            weight_version=self.weight_version,
            pages_cached=self.num_kept_pages,
        )

    def _dispatch(self) -> list[tuple[Sequence, list[int]]]:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._running[sequence.request_id] = sequence
        going_on = [sequence for sequence in self._running.values() if not sequence.ends_by_length]
        dispatched = [(sequence, self._next_tokens(sequence)) for sequence in going_on]
        for sequence, token_ids in dispatched:
            sequence.num_in_flight += len(token_ids)
        return dispatched

    def _next_tokens(self, sequence: Sequence) -> list[int]:
        start, prompt = len(sequence.output_token_ids) + sequence.num_in_flight, sequence.prompt_token_ids
        return [prompt[position % len(prompt)] for position in range(start, start + next(self.counts))]

    def _land(self, sequence: Sequence, token_ids: list[int]) -> SequenceOutput:
        sequence.num_in_flight -= len(token_ids)
        finish_reason, landed = None, 0
        while finish_reason is None and landed < len(token_ids):
            landed += 1
            if sequence.status is not SequenceStatus.FINISHED:
                finish_reason = self._append(sequence, token_ids[landed - 1])
        logprobs = [TokenLogprobs([one, 97], [-one / 8, -0.5], [3, 1]) for one in token_ids[:landed]]
        wanted = sequence.params.logprobs is not None
        return SequenceOutput(sequence.request_id, token_ids[:landed], finish_reason, logprobs if wanted else ())

    def _append(self, sequence: Sequence, token_id: int) -> str | None:
        """The finish reason, if the sequence ends with this token."""
        sequence.output_token_ids.append(token_id)
        by_length = len(sequence.output_token_ids) >= sequence.max_tokens
        reason = "stop" if token_id in sequence.stop_token_ids else "length" if by_length else None
        if reason is not None:
            self._end(sequence)
        return reason

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence.request_id]
        sequence.status = SequenceStatus.FINISHED
