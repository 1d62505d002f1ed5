"""The prompt before its completion, for ``echo``."""

from typing import Any, TypeVar

import msgspec

from driver.request import Usage
from ipc.async_client import AsyncClient
from ipc.gateway.endpoints.text_chunks import TextChunks
from ipc.openai.answer_bodies import PromptLogprobs, TextChoice, TextCompletion
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.logprob_bodies import TextLogprobs, TextPlace, text_logprobs
from ipc.openai.question import BodyError, Question
from ipc.openai.request_bodies import CompletionRequest
from ipc.wire.completion import Completion, Piece

Ended = TypeVar("Ended", Piece, TextChoice)


class Echo:
    """The text of a prompt, and with log-probabilities that of its first token, which has none.

    The tokenizer has put ``num_behind`` tokens behind the text.
    """

    def __init__(
        self, text: str, first: str | None, answer_format: AnswerFormat, *, alone: bool, num_behind: int = 0
    ) -> None:
        self.text = text
        self._format = answer_format
        self._first = first
        self._num_behind = num_behind
        self._alone = alone
        """Whether only the prompt is wanted: the one token generated in any case is left out."""
        self._prompt_logprobs: PromptLogprobs = []
        self._knows_prompt = first is None
        """Whether all that is said of the prompt is there, which comes before its first sample begins."""
        self._held: list[Piece] = []
        self._said: set[int] = set()

    def before(self, whole: Completion, answer: TextCompletion) -> TextCompletion:
        """The answer with the prompt before each sample."""
        self._prompt_logprobs = whole.prompt_logprobs
        choices = [self._before(choice) for choice in answer.choices]
        return msgspec.structs.replace(answer, choices=choices)

    def chunks(self, chunks: TextChunks, piece: Piece, number: int, first_index: int) -> list[TextCompletion]:
        """The chunks of a piece, after the prompt; none before the prompt's logprobs are known."""
        self._held.append(piece)
        self._prompt_logprobs += piece.prompt_logprobs
        self._knows_prompt |= piece.index == 0 and bool(piece.token_ids or piece.finish_reason)
        if not self._knows_prompt:
            return []
        held, self._held = self._held, []
        return [chunk for one in held for chunk in self._chunks(chunks, one, number, first_index)]

    def cost(self, cost: Usage) -> Usage:
        """The usage without what was not asked for."""
        return Usage(cost.prompt_tokens, 0, cost.cached_tokens) if self._alone else cost

    def _chunks(self, chunks: TextChunks, piece: Piece, number: int, first_index: int) -> list[TextCompletion]:
        said = []
        piece = msgspec.structs.replace(piece, prompt_logprobs=[])
        if piece.index not in self._said:
            self._said.add(piece.index)
            said.append(chunks.echo(first_index + piece.index, self.text, self._logprobs()))
        if self._alone:
            piece = msgspec.structs.replace(_at_limit(piece), text="", token_ids=[], logprobs=[])
        return [*said, *chunks.take(piece, number, first_index)]

    def _before(self, choice: TextChoice) -> TextChoice:
        text, logprobs = self.text, self._logprobs()
        if self._alone:
            choice = _at_limit(choice)
        else:
            text += choice.text
            if logprobs is not None and choice.logprobs is not None:
                logprobs = _joined(logprobs, choice.logprobs, len(self.text))
        return msgspec.structs.replace(
            choice, text=text, logprobs=logprobs, token_ids=msgspec.UNSET, prompt_logprobs=msgspec.UNSET
        )

    def _logprobs(self) -> TextLogprobs | None:
        if self._first is None:
            return None
        known = [token for token in self._prompt_logprobs if token is not None]
        written = known[: len(known) - self._num_behind]
        place = TextPlace()
        place.pass_text(self._first)
        place.pass_tokens(written)
        added = place.end - len(self.text)  # by the tokenizer, in front of the text
        columns = text_logprobs(known, self._format, TextPlace(-max(0, added)), first=self._first)
        offsets = [min(offset, len(self.text)) for offset in columns.text_offset]
        return msgspec.structs.replace(columns, text_offset=offsets)


def _at_limit(ended: Ended) -> Ended:
    """What ended with a token that was not asked for, with the end that it has without that token."""
    if ended.finish_reason != "stop":
        return ended
    return msgspec.structs.replace(ended, finish_reason="length", stop_reason=None)


async def echoed(client: AsyncClient, asked: Question, body: CompletionRequest) -> tuple[Question, Echo]:
    """The question to send instead, and the echo; raises BodyError if that is not possible."""
    for name, unfit in {
        "detokenize": body.detokenize is False,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "return_token_ids": bool(body.return_token_ids),
    }.items():
        if unfit:
            raise BodyError(f"{name} does not go with echo", name)
    prompt, params = asked.prompt, dict(asked.params)
    assert prompt is not None
    alone = params["max_tokens"] == 0
    if alone:
        params["max_tokens"] = 1
    first = None
    if body.logprobs is not None:
        params["prompt_logprobs"] = body.logprobs
        asked = asked._replace(names={"prompt_logprobs": "logprobs"})
        if isinstance(prompt, str):
            token_ids = await client.tokenize(prompt)
            first = await _first(client, token_ids)
            num_behind = _num_behind(token_ids, await client.tokenize(prompt, add_special_tokens=False))
            echo = Echo(prompt, first, asked.answer_format, alone=alone, num_behind=num_behind)
            return asked._replace(prompt=token_ids, params=params), echo
        first = await _first(client, prompt)
    text = prompt if isinstance(prompt, str) else await client.detokenize(prompt)
    return asked._replace(params=params), Echo(text, first, asked.answer_format, alone=alone)


async def _first(client: AsyncClient, token_ids: list[int]) -> str:
    return await client.detokenize(token_ids[:1])


def _num_behind(token_ids: list[int], plain: list[int]) -> int:
    """How many tokens are behind those of the plain text."""
    added = len(token_ids) - len(plain)
    return next((count for count in range(added + 1) if token_ids[added - count :][: len(plain)] == plain), 0)


def _joined(prompt: TextLogprobs, output: TextLogprobs, length: int) -> TextLogprobs:
    columns: dict[str, Any] = {
        name: getattr(prompt, name) + getattr(output, name) for name in ("tokens", "token_logprobs", "top_logprobs")
    }
    offsets = prompt.text_offset + [length + offset for offset in output.text_offset]
    return TextLogprobs(**columns, text_offset=offsets)
