"""Streams of completions for OpenAI's clients: pieces of text as chunks."""

from collections import defaultdict
from typing import Any

from msgspec import UNSET, UnsetType

from driver.request import Usage
from ipc.gateway.endpoints.stream_usage import StreamUsage
from ipc.openai.answer_bodies import TextChoice, TextCompletion, ending, total, usage
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.logprob_bodies import TextLogprobs, TextPlace, text_logprobs
from ipc.openai.timing_bodies import answer_timings
from ipc.wire.completion import Piece


class TextChunks:
    """Makes the chunks of texts; ``prompts`` has the ids of each one's prompt, if they are shown."""

    def __init__(
        self,
        name: str,
        model: str,
        created: int,
        answer_format: AnswerFormat,
        stream_usage: StreamUsage,
        prompts: list[list[int] | UnsetType],
    ) -> None:
        self._head: dict[str, Any] = {"id": f"cmpl-{name}", "model": model, "created": created}
        self._usage = stream_usage
        self._format = answer_format
        self._prompts = prompts
        self._begun: set[int] = set()
        """The samples of which there has been a piece."""
        self._places: defaultdict[int, TextPlace] = defaultdict(TextPlace)
        """By sample, where the tokens so far end, if there are log-probabilities."""

    def echo(self, index: int, prompt: str, logprobs: TextLogprobs | None) -> TextCompletion:
        """The prompt, before a sample of it."""
        self._places[index] = TextPlace(len(prompt))
        return self._chunk(TextChoice(index=index, text=prompt, logprobs=logprobs))

    def take(self, piece: Piece, number: int = 0, first_index: int = 0) -> list[TextCompletion]:
        """The chunks of a piece of the completion of this number, whose first sample has that
        index."""
        index = first_index + piece.index
        self._usage.take(piece)
        logprobs = text_logprobs(piece.logprobs, self._format, self._places[index]) if piece.logprobs else None
        choice = TextChoice(
            index=index,
            text=piece.text,
            logprobs=logprobs,
            token_ids=piece.token_ids if self._format.with_token_ids else UNSET,
            prompt_logprobs=piece.prompt_logprobs or UNSET,
            prompt_token_ids=UNSET if index in self._begun else self._prompts[number],
            **({} if piece.finish_reason is None else ending(piece.finish_reason, piece)),
        )
        self._begun.add(index)
        return [self._chunk(choice)]

    def total(self, costs: list[Usage]) -> TextCompletion:
        """The last chunk, for streams with usage, from those of all prompts."""
        return TextCompletion(**self._head, choices=[], usage=usage(total(costs)), timings=answer_timings(costs))

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return TextCompletion(**self._head, choices=[choice], usage=self._usage.shown())
