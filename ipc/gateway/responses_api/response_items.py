"""The items of a response while they are written, and the events of their stream."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning
from ipc.gateway.responses_api.sealed_reasoning import sealed

Event = dict[str, Any]
"""As the Responses API has them, but for their ``sequence_number``."""


class ResponseEvent(Struct, frozen=True):
    """What the data of all events have."""

    type: str
    sequence_number: int


class _ItemKind(Struct, frozen=True):
    """The initial item of a type, and the names of its events."""

    prefix: str
    item: dict[str, Any]
    part: dict[str, Any] | None
    name: str


_MESSAGE = _ItemKind(
    "msg",
    {"type": "message", "role": "assistant", "content": []},
    {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "output_text",
)
_REASONING = _ItemKind(
    "rs", {"type": "reasoning", "summary": [], "content": []}, {"type": "reasoning_text", "text": ""}, "reasoning_text"
)
_CALL = _ItemKind("fc", {"type": "function_call", "arguments": ""}, None, "function_call_arguments")


class _Item:
    """The one that is being written, at its place in the output."""

    def __init__(self, kind: _ItemKind, index: int, *, seals: bool, **fields: Any) -> None:
        self.kind = kind
        self._seals = seals
        self.fields = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", **kind.item, **fields, "status": "in_progress"}
        self._at = {"output_index": index}
        self._place = {"item_id": self.fields["id"], **self._at} | ({"content_index": 0} if kind.part else {})
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def added(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", **self._at, "item": self.fields}
        if self.kind.part is not None:
            yield {"type": "response.content_part.added", **self._place, "part": self.kind.part}

    def delta(self, text: str, logprobs: list[Any]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return {"type": f"response.{self.kind.name}.delta", **self._place, "delta": text, **self._beside(logprobs)}

    def done(self, status: str) -> Iterator[Event]:
        text = {"arguments" if self.kind is _CALL else "text": "".join(self._texts)}
        whole: dict[str, Any] = text
        name = {"name": self.fields["name"]} if self.kind is _CALL else {}
        yield {"type": f"response.{self.kind.name}.done", **self._place, **text, **name, **self._beside(self._logprobs)}
        if self.kind.part is not None:
            part = {**self.kind.part, **text, **self._beside(self._logprobs)}
            yield {"type": "response.content_part.done", **self._place, "part": part}
            whole = {"content": [part]}
        if self._seals:
            whole = {**whole, "encrypted_content": sealed(text["text"])}
        self.fields = {**self.fields, **whole, "status": status}
        yield {"type": "response.output_item.done", **self._at, "item": self.fields}

    def _beside(self, logprobs: list[Any]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind is _MESSAGE else {}


class OutputItems:
    """Writes the output of a response, item by item; ``new_call_id`` names one more call."""

    def __init__(self, new_call_id: Callable[[], str], *, seals_reasoning: bool) -> None:
        self.items: list[dict[str, Any]] = []
        """The finished items."""
        self._new_call_id = new_call_id
        self._seals_reasoning = seals_reasoning
        self._item: _Item | None = None

    def take(self, event: OutputEvent, logprobs: list[Any]) -> Iterator[Event]:
        """The events of a parsed event; a content event brings its tokens' log-probabilities."""
        kind = _kind(event)
        if self._item is None or self._item.kind is not kind or isinstance(event, CallBegins):
            yield from self.end()
            fields = {"call_id": self._new_call_id(), "name": event.name} if isinstance(event, CallBegins) else {}
            self._item = _Item(kind, len(self.items), seals=self._seals_reasoning and kind is _REASONING, **fields)
            yield from self._item.added()
        if not isinstance(event, CallBegins):
            yield self._item.delta(event.text, logprobs)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """The item that is being written is done."""
        if self._item is not None:
            yield from self._item.done(status)
            self.items.append(self._item.fields)
            self._item = None


def _kind(event: OutputEvent) -> _ItemKind:
    match event:
        case Content():
            return _MESSAGE
        case Reasoning():
            return _REASONING
        case CallBegins() | CallArguments():
            return _CALL
