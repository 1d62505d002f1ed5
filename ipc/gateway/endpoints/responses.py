"""``/v1/responses``: OpenAI's newer API of conversations. The gateway stores nothing."""

from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from driver.request import Usage
from ipc.async_client import AsyncClient
from ipc.errors import OdriverError
from ipc.gateway.access.memory_limit import HeldMemory, held_by
from ipc.gateway.answers import json_answer
from ipc.gateway.asking import Answer, ask
from ipc.gateway.bodies import read
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.endpoints.answering import answering_of
from ipc.gateway.event_stream import EventStream
from ipc.gateway.request_id import request_id_of, traceparent_of
from ipc.gateway.responses_api.response_answers import ResponseAnswer, ResponseObject
from ipc.gateway.responses_api.response_items import Event, ResponseEvent
from ipc.gateway.responses_api.response_requests import ResponseRequest
from ipc.gateway.upstream.replicas import daemon_for

__all__ = ["ResponseEvent", "ResponseObject", "create"]

_encoder = msgspec.json.Encoder()


async def create(request: Request) -> Response:
    """Continue a conversation."""
    body = await read(request, ResponseRequest)
    return await unless_disconnected(request.receive, _answered(request, body))


async def _answered(request: Request, body: ResponseRequest) -> Response:
    name, asked = request_id_of(request, body.request_id), body.question()
    daemon, client = await daemon_for(request, body.model)
    asked, answering = await answering_of(daemon, client, asked, body.tool_use(), hides_reasoning=False)
    held = held_by(request)
    stream = ask(client, asked, held, traceparent=traceparent_of(request))
    answer = ResponseAnswer(body, answering, asked.answer_format, name, client.welcome)
    events = _events(stream, answer, client, None if body.stream else held)
    if body.stream:
        return EventStream(_encoded(events), done=b"", error_event=lambda error: _event(answer.error(error.error)))
    async for _ in events:
        pass
    return json_answer(answer.response())


async def _events(
    stream: Answer, answer: ResponseAnswer, client: AsyncClient, held: HeldMemory | None
) -> AsyncGenerator[list[Event]]:
    """The events of each piece. A whole answer is ``held``. The first piece may be a refusal."""
    began = False
    async with stream as pieces:
        async for piece in pieces:
            if held is not None:
                held.add_piece(piece)
            events = [] if began else list(answer.begin())
            began = True
            events += answer.take(piece)
            if piece.usage is not None:
                events.append(answer.finish(piece.usage, await _reasoning_tokens(client, answer, piece.usage)))
            yield events


async def _reasoning_tokens(client: AsyncClient, answer: ResponseAnswer, cost: Usage) -> int:
    """As many as the thoughts have by themselves; if the daemon refuses to count, by their share of the text."""
    if not answer.reasoning:
        return 0
    try:
        return len(await client.tokenize(answer.reasoning, add_special_tokens=False))
    except OdriverError:
        return round(cost.completion_tokens * len(answer.reasoning) / answer.length)


async def _encoded(all_events: AsyncGenerator[list[Event]]) -> AsyncGenerator[bytes]:
    async for events in all_events:
        if events:
            yield b"".join(map(_event, events))


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + _encoder.encode(event) + b"\n\n"
