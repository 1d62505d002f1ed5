"""Responses of the Responses API: whole, or as the events of a stream."""

import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage
from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.output.output_events import OutputEvent, Reasoning
from ipc.gateway.responses_api.content_tokens import ContentTokens
from ipc.gateway.responses_api.response_items import Event, OutputItems
from ipc.gateway.responses_api.response_requests import (
    FunctionTool,
    NamedFunctionTool,
    ReasoningOptions,
    ResponseRequest,
    TextFormat,
)
from ipc.openai.answer_bodies import THEIR_REASONS, ErrorDetail
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.logprob_bodies import chat_logprobs
from ipc.openai.timing_bodies import AnswerTimings, answer_timings
from ipc.wire.completion import Piece
from ipc.wire.messages import Welcome


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response in its present state: ``status`` is in_progress, completed or incomplete.

    ``weight_versions`` are as in BaseChoice (ipc/openai/answer_bodies.py).
    """

    id: str
    created_at: int
    model: str
    object: Literal["response"] = "response"
    status: str
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool
    parallel_tool_calls: bool
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    reasoning: ReasoningOptions
    metadata: dict[str, str]
    user: str | None
    service_tier: Literal["default"] = "default"
    prompt_cache_key: str | None
    safety_identifier: str | None
    timings: AnswerTimings | UnsetType = UNSET
    weight_versions: list[tuple[int, int]] | UnsetType = UNSET


class ResponseAnswer:
    """Makes one response of the pieces of its only sample."""

    def __init__(
        self, body: ResponseRequest, answering: Answering, answer_format: AnswerFormat, name: str, welcome: Welcome
    ) -> None:
        self._body = body
        self._defaults = {"temperature": 1.0, "top_p": 1.0, **welcome.default_sampling_params}
        self._format = answer_format
        self._parser = answering.parser()
        self._output = OutputItems(answering.new_call_id, seals_reasoning=body.seals_reasoning)
        model = body.model or welcome.model
        self._head: dict[str, Any] = {"id": f"resp_{name}", "created_at": int(time.time()), "model": model}
        self._num_events = 0
        self._status = "in_progress"
        self._details: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._timings: AnswerTimings | UnsetType = UNSET
        self._weight_versions: list[tuple[int, int]] | UnsetType = UNSET
        self._tokens = ContentTokens()
        self.reasoning = ""
        self.length = 0
        """Characters of the whole text."""

    def begin(self) -> Iterator[Event]:
        """The first events of a stream."""
        for name in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{name}", "response": self.response()})

    def take(self, piece: Piece) -> Iterator[Event]:
        """The events of a piece of the completion."""
        self.length += len(piece.text)
        self._tokens.add(piece.logprobs)
        events = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.end()
        for event in events:
            yield from map(self._numbered, self._take(event))
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)
            self._weight_versions = piece.weight_versions or UNSET
            yield from map(self._numbered, self._output.end(self._status))

    def finish(self, cost: Usage, num_reasoning_tokens: int) -> Event:
        """The last event of a stream."""
        self._usage = {
            "input_tokens": cost.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cost.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": cost.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": cost.prompt_tokens + cost.completion_tokens,
        }
        self._timings = answer_timings([cost])
        return self._numbered({"type": f"response.{self._status}", "response": self.response()})

    def error(self, detail: ErrorDetail) -> Event:
        """The event that ends a stream which has failed."""
        return self._numbered({"type": "error", "code": detail.code, "message": detail.message, "param": detail.param})

    def response(self) -> ResponseObject:
        """The response in its present state."""
        body = self._body
        form = msgspec.to_builtins((body.text and body.text.format) or TextFormat())
        return ResponseObject(
            **self._head,
            status=self._status,
            incomplete_details=self._details,
            instructions=body.instructions,
            output=list(self._output.items),
            usage=self._usage,
            timings=self._timings,
            weight_versions=self._weight_versions,
            max_output_tokens=body.max_output_tokens,
            temperature=self._defaults["temperature"] if body.temperature is None else body.temperature,
            top_p=self._defaults["top_p"] if body.top_p is None else body.top_p,
            top_logprobs=body.top_logprobs or 0,
            text={
                "format": {name: value for name, value in form.items() if value is not None},
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or ReasoningOptions(),
            metadata=body.metadata or {},
            user=body.user,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
        )

    def _end(self, reason: str) -> None:
        """What OpenAI has no word for is an end at the limit, beside which ours is told."""
        if THEIR_REASONS[reason] != "length":
            self._status = "completed"
            return
        self._status, self._details = "incomplete", {"reason": "max_output_tokens"}
        if reason != "length":
            self._details["stop_reason"] = reason

    def _take(self, event: OutputEvent) -> Iterator[Event]:
        if isinstance(event, Reasoning):
            self.reasoning += event.text
        tokens = self._tokens.take(event)
        shown = msgspec.to_builtins(chat_logprobs(tokens, self._format).content) if tokens else []
        return self._output.take(event, shown)

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}
