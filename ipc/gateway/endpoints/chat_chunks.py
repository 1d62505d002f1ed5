"""What OpenAI's clients are streamed of a chat: pieces of a completion, read as what they are, as chunks."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage
from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.output.output_events import CallArguments, CallBegins, Content, OutputEvent, Reasoning
from ipc.gateway.output.output_parser import OutputParser
from ipc.openai.answer_bodies import ChatLogprobs, CompletionUsage, PromptLogprobs, chat_logprobs, usage
from ipc.wire.completion import Piece


class FunctionDelta(Struct, frozen=True):
    """What is new of a call: its function, or more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """What is new of the ``index``-th call; its first has the id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """What is new of a message."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """What is new of one sample of a chat; its last has a ``finish_reason``."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    """An event of ``/v1/chat/completions``. ``usage`` is there if asked for: null, but in the last, which has no choice."""

    id: str
    model: str
    created: int
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ChatChunks:
    """Makes the chunks of one chat, asked for with these params; the first of a sample says who speaks."""

    def __init__(
        self, name: str, model: str, created: int, params: dict[str, Any], answering: Answering, *, with_usage: bool
    ) -> None:
        self._head = (f"chatcmpl-{name}", model, created)
        self._usage = None if with_usage else UNSET
        self._num_logprobs: int = params.get("logprobs") or 0
        self._with_token_ids = params.get("detokenize") is False
        self._answering = answering
        self._parsers: dict[int, OutputParser] = {}
        """By sample; who has one has begun to speak."""

    def take(self, piece: Piece) -> list[ChatChunk]:
        """What a piece of the completion comes to: nothing, where it is not settled what it is."""
        parser = self._parsers.get(piece.index)
        choices = []
        if parser is None:
            parser = self._parsers[piece.index] = self._answering.parser()
            prompt_logprobs = piece.prompt_logprobs or UNSET
            choices.append(ChatChunkChoice(piece.index, Delta("", "assistant"), prompt_logprobs=prompt_logprobs))
        events = parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += parser.end()
        choices += self._choices(piece, [self._delta(event) for event in events], parser)
        return [ChatChunk(*self._head, [choice], self._usage) for choice in choices]

    def total(self, cost: Usage) -> ChatChunk:
        """The last one, of those that asked for the usage."""
        return ChatChunk(*self._head, [], usage(cost))

    def _choices(self, piece: Piece, deltas: list[Delta], parser: OutputParser) -> list[ChatChunkChoice]:
        """One for each delta, the last of which has what there is beside; one for that alone where there is none."""
        reason = None if piece.finish_reason is None else parser.finish_reason(piece.finish_reason)
        *others, last = deltas or [Delta()]
        if not deltas and reason is None and not piece.logprobs and not self._with_token_ids:
            return []
        beside = ChatChunkChoice(
            piece.index,
            last,
            chat_logprobs(piece.logprobs, self._num_logprobs) if piece.logprobs else None,
            reason,
            piece.token_ids if self._with_token_ids else UNSET,
        )
        return [*(ChatChunkChoice(piece.index, delta) for delta in others), beside]

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
