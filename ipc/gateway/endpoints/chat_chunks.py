"""A chat's stream: pieces of a completion, parsed, as OpenAI's chunks."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage
from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning
from ipc.gateway.output.output_parser import OutputParser
from ipc.openai.answer_bodies import BaseAnswer, BaseChoice, ChatLogprobs, chat_logprobs, usage
from ipc.wire.completion import Piece


class FunctionDelta(Struct, frozen=True):
    """The new part of a call: its function's name, or more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """The new part of the ``index``-th call; the first part has the id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """The new part of a message."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(BaseChoice, frozen=True, kw_only=True):
    """The new part of one sample of a chat."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(BaseAnswer, frozen=True, kw_only=True):
    """An event of ``/v1/chat/completions``."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ChatChunks:
    """Makes the chunks of one chat; the first of each sample has the role."""

    def __init__(
        self, name: str, model: str, created: int, params: dict[str, Any], answering: Answering, *, with_usage: bool
    ) -> None:
        self._head: dict[str, Any] = {"id": f"chatcmpl-{name}", "model": model, "created": created}
        self._usage = None if with_usage else UNSET
        self._num_logprobs: int = params.get("logprobs") or 0
        self._with_token_ids = params.get("detokenize") is False
        self._answering = answering
        self._parsers: dict[int, OutputParser] = {}
        """By sample; each is made with the sample's first piece."""

    def take(self, piece: Piece) -> list[ChatChunk]:
        """The chunks of a piece: none, while its meaning is not settled."""
        parser = self._parsers.get(piece.index)
        choices = []
        if parser is None:
            parser = self._parsers[piece.index] = self._answering.parser()
            prompt_logprobs = piece.prompt_logprobs or UNSET
            first = ChatChunkChoice(index=piece.index, delta=Delta("", "assistant"), prompt_logprobs=prompt_logprobs)
            choices.append(first)
        events = parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += parser.end()
        choices += self._choices(piece, [self._delta(event) for event in events], parser)
        return [ChatChunk(**self._head, choices=[choice], usage=self._usage) for choice in choices]

    def total(self, cost: Usage) -> ChatChunk:
        """The last chunk, for streams with usage."""
        return ChatChunk(**self._head, choices=[], usage=usage(cost))

    def _choices(self, piece: Piece, deltas: list[Delta], parser: OutputParser) -> list[ChatChunkChoice]:
        """A choice for each delta; log-probabilities and the like come with the last, or alone."""
        reason = None if piece.finish_reason is None else parser.finish_reason(piece.finish_reason)
        *others, last = deltas or [Delta()]
        if not deltas and reason is None and not piece.logprobs and not self._with_token_ids:
            return []
        beside = ChatChunkChoice(
            index=piece.index,
            delta=last,
            logprobs=chat_logprobs(piece.logprobs, self._num_logprobs) if piece.logprobs else None,
            finish_reason=reason,
            token_ids=piece.token_ids if self._with_token_ids else UNSET,
        )
        return [*(ChatChunkChoice(index=piece.index, delta=delta) for delta in others), beside]

    def _delta(self, event: OutputEvent) -> Delta:
        match event:
            case Content(text):
                return Delta(text)
            case Reasoning(text):
                return Delta(reasoning_content=text, reasoning=text)
            case CallBegins(index, name):
                return Delta(
                    tool_calls=[
                        ToolCallDelta(index, FunctionDelta("", name), self._answering.new_call_id(), "function")
                    ]
                )
            case CallArguments(index, text):
                return Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
