"""Streams of completions for OpenAI's clients: pieces of text as chunks."""

from collections import defaultdict
from typing import Any

from msgspec import UNSET

from driver.request import Usage
from ipc.openai.answer_bodies import TextChoice, TextCompletion, TextLogprobs, text_logprobs, usage
from ipc.wire.completion import Piece


class TextChunks:
    """Makes the chunks of one text, asked for with these params."""

    def __init__(self, name: str, model: str, created: int, params: dict[str, Any], *, with_usage: bool) -> None:
        self._head: dict[str, Any] = {"id": f"cmpl-{name}", "model": model, "created": created}
        self._usage = None if with_usage else UNSET
        self._with_token_ids = params.get("detokenize") is False
        self._lengths: defaultdict[int, int] = defaultdict(int)

    def echo(self, index: int, prompt: str, logprobs: TextLogprobs | None) -> TextCompletion:
        """The prompt, before a sample of it."""
        self._lengths[index] = len(prompt)
        return self._chunk(TextChoice(index=index, text=prompt, logprobs=logprobs))

    def take(self, piece: Piece, first_index: int = 0) -> list[TextCompletion]:
        """The chunks of a piece; ``first_index`` is the index of its completion's first sample."""
        index = first_index + piece.index
        logprobs = text_logprobs(piece.logprobs, self._lengths[index]) if piece.logprobs else None
        self._lengths[index] += len(piece.text)
        choice = TextChoice(
            index=index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            token_ids=piece.token_ids if self._with_token_ids else UNSET,
            prompt_logprobs=piece.prompt_logprobs or UNSET,
        )
        return [self._chunk(choice)]

    def total(self, cost: Usage) -> TextCompletion:
        """The last chunk, for streams with usage."""
        return TextCompletion(**self._head, choices=[], usage=usage(cost))

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return TextCompletion(**self._head, choices=[choice], usage=self._usage)
