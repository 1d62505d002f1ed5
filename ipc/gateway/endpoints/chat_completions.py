"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ipc.async_client import AsyncStream
from ipc.gateway.access.memory_limit import held_by
from ipc.gateway.answers import encoded, json_answer
from ipc.gateway.bodies import read
from ipc.gateway.daemons import daemon_for
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.endpoints.answering import answering_of
from ipc.gateway.endpoints.chat_chunks import ChatChunks
from ipc.gateway.event_stream import EventStream, event
from ipc.gateway.request_id import request_id_of
from ipc.gateway.streams import gathered
from ipc.openai.answer_bodies import chat_completion
from ipc.openai.request_bodies import ChatCompletionRequest


async def create(request: Request) -> Response:
    """Continue a conversation."""
    body = await read(request, ChatCompletionRequest)
    asked = body.question()
    assert asked.messages is not None
    daemon, client = await daemon_for(request, body.model)
    name, model, created = request_id_of(request), client.welcome.model, int(time.time())
    answering = await answering_of(
        daemon, client, asked, body.tool_use(), hides_reasoning=body.include_reasoning is False
    )
    params = answering.params(asked.params)
    stream = client.chat(
        asked.messages,
        stream=bool(body.stream),
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        **params,
    )
    if body.stream:
        chunks = ChatChunks(name, model, created, params, answering, with_usage=body.includes_usage)
        return EventStream(_events(stream, chunks, with_usage=body.includes_usage))
    (completion,) = await unless_disconnected(request.receive, gathered([stream], held_by(request)))
    answer = chat_completion(completion, params, name, model, answering.message)
    return json_answer(msgspec.structs.replace(answer, created=created))


async def _events(stream: AsyncStream, chunks: ChatChunks, *, with_usage: bool) -> AsyncGenerator[bytes]:
    async with stream:
        async for piece in stream:
            said = chunks.take(piece)
            if piece.usage is not None and with_usage:
                said.append(chunks.total(piece.usage))
            if said:
                yield b"".join([event(encoded(chunk)) for chunk in said])
