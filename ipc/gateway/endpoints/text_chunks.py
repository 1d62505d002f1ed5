"""What OpenAI's clients are streamed of a text: pieces of a completion as chunks."""

from collections import defaultdict
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Usage
from ipc.openai.answer_bodies import CompletionUsage, PromptLogprobs, TextLogprobs, text_logprobs, usage
from ipc.wire.completion import Piece


class TextChunkChoice(Struct, frozen=True):
    """What is new of one sample of a text; its last has a ``finish_reason``."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChunk(Struct, frozen=True):
    """An event of ``/v1/completions``. ``usage`` is there if asked for: null, but in the last, which has no choice."""

    id: str
    model: str
    created: int
    choices: list[TextChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class TextChunks:
    """Makes the chunks of one text, asked for with these params."""

    def __init__(self, name: str, model: str, created: int, params: dict[str, Any], *, with_usage: bool) -> None:
        self._head = (f"cmpl-{name}", model, created)
        self._usage = None if with_usage else UNSET
        self._with_token_ids = params.get("detokenize") is False
        self._lengths: defaultdict[int, int] = defaultdict(int)

    def echo(self, index: int, prompt: str, logprobs: TextLogprobs | None) -> TextChunk:
        """The prompt, before a sample of it."""
        self._lengths[index] = len(prompt)
        return TextChunk(*self._head, [TextChunkChoice(index, prompt, logprobs)], self._usage)

    def take(self, piece: Piece, first_index: int = 0) -> list[TextChunk]:
        """What a piece of a completion comes to, whose first sample has this index."""
        index = first_index + piece.index
        logprobs = text_logprobs(piece.logprobs, self._lengths[index]) if piece.logprobs else None
        self._lengths[index] += len(piece.text)
        choice = TextChunkChoice(
            index,
            piece.text,
            logprobs,
            piece.finish_reason,
            piece.token_ids if self._with_token_ids else UNSET,
            piece.prompt_logprobs or UNSET,
        )
        return [TextChunk(*self._head, [choice], self._usage)]

    def total(self, cost: Usage) -> TextChunk:
        """The last one, of those that asked for the usage."""
        return TextChunk(*self._head, [], usage(cost))
