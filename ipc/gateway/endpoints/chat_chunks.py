"""A chat's stream: pieces of a completion, parsed, as OpenAI's chunks."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage
from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.endpoints.stream_usage import StreamUsage
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning
from ipc.gateway.output.output_parser import AnswerParser
from ipc.openai.answer_bodies import BaseAnswer, BaseChoice, ending, usage
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.logprob_bodies import ChatLogprobs, chat_logprobs
from ipc.openai.timing_bodies import answer_timings
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
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunks:
    """Makes the chunks of one chat; the first of each sample has the role, and the first of all
    the prompt's ids, if they are shown."""

    def __init__(
        self,
        name: str,
        model: str,
        created: int,
        answer_format: AnswerFormat,
        answering: Answering,
        stream_usage: StreamUsage,
        prompt_token_ids: list[int] | UnsetType,
    ) -> None:
        self._head: dict[str, Any] = {"id": f"chatcmpl-{name}", "model": model, "created": created}
        self._usage = stream_usage
        self._format = answer_format
        self._prompt_token_ids = prompt_token_ids
        self._answering = answering
        self._parsers: dict[int, AnswerParser] = {}
        """By sample; each is made with the sample's first piece."""

    def take(self, piece: Piece) -> list[ChatChunk]:
        """The chunks of a piece: none, while its meaning is not settled."""
        self._usage.take(piece)
        parser = self._parsers.get(piece.index)
        choices = []
        prompt_logprobs = piece.prompt_logprobs or UNSET
        if parser is None:
            parser = self._parsers[piece.index] = self._answering.parser()
            first = ChatChunkChoice(index=piece.index, delta=Delta("", "assistant"), prompt_logprobs=prompt_logprobs)
            choices.append(first)
        elif piece.prompt_logprobs:  # they come with each part of the prompt
            choices.append(ChatChunkChoice(index=piece.index, delta=Delta(), prompt_logprobs=prompt_logprobs))
        events = parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += parser.end()
        choices += self._choices(piece, [self._delta(event) for event in events], parser)
        return [self._chunk(choice) for choice in choices]

    def total(self, cost: Usage) -> ChatChunk:
        """The last chunk, for streams with usage."""
        return ChatChunk(**self._head, choices=[], usage=usage(cost), timings=answer_timings([cost]))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        prompt_token_ids, self._prompt_token_ids = self._prompt_token_ids, UNSET
        usage_so_far = self._usage.shown()
        return ChatChunk(**self._head, choices=[choice], usage=usage_so_far, prompt_token_ids=prompt_token_ids)

    def _choices(self, piece: Piece, deltas: list[Delta], parser: AnswerParser) -> list[ChatChunkChoice]:
        """A choice for each delta; log-probabilities and the like come with the last, or alone."""
        end = {} if piece.finish_reason is None else ending(parser.finish_reason(piece.finish_reason), piece)
        *others, last = deltas or [Delta()]
        if not deltas and not end and not piece.logprobs and not self._format.with_token_ids:
            return []
        beside = ChatChunkChoice(
            index=piece.index,
            delta=last,
            logprobs=chat_logprobs(piece.logprobs, self._format) if piece.logprobs else None,
            token_ids=piece.token_ids if self._format.with_token_ids else UNSET,
            **end,
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
