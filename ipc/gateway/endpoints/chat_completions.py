"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.access.memory_limit import held_by
from ipc.gateway.answers import encoded, json_answer
from ipc.gateway.asking import Answer, ask, prompt_token_ids, shown_prompt
from ipc.gateway.bodies import read
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.endpoints.answering import answering_of
from ipc.gateway.endpoints.chat_chunks import ChatChunks
from ipc.gateway.endpoints.stream_usage import StreamUsage
from ipc.gateway.event_stream import EventStream, event
from ipc.gateway.request_id import request_id_of, traceparent_of
from ipc.gateway.streams import gathered
from ipc.gateway.upstream.replicas import daemon_for
from ipc.openai.answer_bodies import chat_completion
from ipc.openai.request_bodies import ChatCompletionRequest
from ipc.openai.timing_bodies import answer_timings


async def create(request: Request) -> Response:
    """Continue a conversation."""
    body = await read(request, ChatCompletionRequest)
    return await unless_disconnected(request.receive, _answered(request, body))


async def _answered(request: Request, body: ChatCompletionRequest) -> Response:
    name, asked = request_id_of(request, body.request_id), body.question()
    daemon, client = await daemon_for(request, body.model)
    model, created, trace = body.model or client.welcome.model, int(time.time()), traceparent_of(request)
    asked, answering = await answering_of(
        daemon, client, asked, body.tool_use(), hides_reasoning=body.include_reasoning is False
    )
    prompt, held = await shown_prompt(client, asked), held_by(request)
    if body.stream:
        num_prompt_tokens = len(await prompt_token_ids(client, asked)) if body.continues_usage else None
        so_far = StreamUsage(num_prompt_tokens, included=body.includes_usage)
        chunks = ChatChunks(name, model, created, asked.answer_format, answering, so_far, prompt)
        stream = ask(client, asked, held, traceparent=trace)
        return EventStream(_events(stream, chunks, with_usage=body.includes_usage))
    stream = ask(client, asked, held, stream=False, traceparent=trace)
    (completion,) = await gathered([stream], held)
    answer = chat_completion(completion, asked.answer_format, name, model, prompt, answering.message)
    timings = answer_timings([completion.usage])
    return json_answer(msgspec.structs.replace(answer, created=created, timings=timings))


async def _events(stream: Answer, chunks: ChatChunks, *, with_usage: bool) -> AsyncGenerator[bytes]:
    async with stream as pieces:
        async for piece in pieces:
            said = chunks.take(piece)
            if piece.usage is not None and with_usage:
                said.append(chunks.total(piece.usage))
            if said:
                yield b"".join([event(encoded(chunk)) for chunk in said])
