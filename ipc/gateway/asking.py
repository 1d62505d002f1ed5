"""Sending questions to a daemon."""

from types import TracebackType

from msgspec import UNSET, UnsetType

from ipc.async_client import AsyncClient, AsyncStream
from ipc.errors import RequestFailed
from ipc.gateway.access.memory_limit import HeldMemory
from ipc.openai.question import Question


async def tokenized(client: AsyncClient, asked: Question) -> Question:
    """With a prompt's ids, where it is to have no special tokens."""
    if asked.add_special_tokens or not isinstance(asked.prompt, str):
        return asked
    token_ids = await client.tokenize(
        asked.prompt, add_special_tokens=False, truncate_prompt_tokens=_num_kept(client, asked)
    )
    return asked._replace(prompt=token_ids)


async def prompt_token_ids(client: AsyncClient, asked: Question) -> list[int]:
    """The ids of a question's prompt, as they are given to the model."""
    kept = _num_kept(client, asked)
    if isinstance(asked.prompt, list):
        return asked.prompt if kept is None else asked.prompt[-kept:]
    return await client.tokenize(
        asked.prompt,
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        truncate_prompt_tokens=kept,
    )


def _num_kept(client: AsyncClient, asked: Question) -> int | None:
    """How many of a prompt's last tokens are used; None for all, or for a number that the daemon
    refuses."""
    kept = asked.params.get("truncate_prompt_tokens") or 0
    if kept == -1:
        kept = max(1, client.welcome.max_model_len - (asked.params.get("max_tokens") or 1))
    return kept if kept > 0 else None


async def shown_prompt(client: AsyncClient, asked: Question) -> list[int] | UnsetType:
    """The same, if the answer is to have them."""
    return await prompt_token_ids(client, asked) if asked.answer_format.with_prompt_token_ids else UNSET


class Answer:
    """The pieces of an answer, for the time of an ``async with`` statement, whose end aborts the rest of it. An error
    of the daemon is raised as ``Question.naming`` has it."""

    def __init__(self, asked: Question, pieces: AsyncStream) -> None:
        self._asked = asked
        self._pieces = pieces

    async def __aenter__(self) -> AsyncStream:
        return self._pieces

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._pieces.close()
        if isinstance(error, RequestFailed):
            with self._asked.naming():
                raise error


def ask(
    client: AsyncClient, asked: Question, held: HeldMemory | None, *, stream: bool = True, traceparent: str = ""
) -> Answer:
    """Send it, as a part of a trace perhaps. Its memory is ``held``, None where one file has all that is asked. Raises
    BodyError, also where there is no room, and RequestFailed for what no message can hold."""
    with asked.naming():
        pieces = _send(client, asked, stream=stream, traceparent=traceparent)
    if held is not None:
        held.add(pieces.num_bytes)
    return Answer(asked, pieces)


def _send(client: AsyncClient, asked: Question, *, stream: bool, traceparent: str) -> AsyncStream:
    if asked.messages is None:
        assert asked.prompt is not None
        return client.generate(asked.prompt, stream=stream, traceparent=traceparent, **asked.params)
    return client.chat(
        asked.messages,
        stream=stream,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        traceparent=traceparent,
        **asked.params,
    )
