"""``/v1/completions``."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from driver.request import Usage
from ipc.async_client import AsyncClient, AsyncStream
from ipc.gateway.access.memory_limit import held_by
from ipc.gateway.answers import encoded, json_answer
from ipc.gateway.bodies import read
from ipc.gateway.daemons import daemon_for
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.endpoints.echo import Echo, echoed
from ipc.gateway.endpoints.text_chunks import TextChunks
from ipc.gateway.event_stream import EventStream, event
from ipc.gateway.request_id import request_id_of
from ipc.gateway.streams import gathered, merged
from ipc.openai.answer_bodies import TextCompletion, text_completion, usage
from ipc.openai.request_bodies import CompletionRequest, Question
from ipc.wire.completion import Completion


async def create(request: Request) -> Response:
    """Continue a text, or each of several."""
    body = await read(request, CompletionRequest)
    questions = body.questions()
    client = (await daemon_for(request, body.model)).client
    name, model, created = request_id_of(request), client.welcome.model, int(time.time())
    echoes: list[Echo] = []
    if body.echo:
        both = await asyncio.gather(*(echoed(client, asked, body) for asked in questions))
        questions, echoes = [asked for asked, _ in both], [echo for _, echo in both]
    streams = [_asked(client, asked, stream=bool(body.stream)) for asked in questions]
    if body.stream:
        chunks = TextChunks(name, model, created, questions[0].params, with_usage=body.includes_usage)
        return EventStream(_events(streams, chunks, body, echoes))
    completions = await unless_disconnected(request.receive, gathered(streams, held_by(request)))
    answers = [_answer(one, name, model, asked) for one, asked in zip(completions, questions, strict=True)]
    costs = [completion.usage for completion in completions]
    if echoes:
        answers = [echo.before(*one) for echo, one in zip(echoes, zip(completions, answers, strict=True), strict=True)]
        costs = [echo.cost(cost) for echo, cost in zip(echoes, costs, strict=True)]
    return json_answer(_joined(answers, costs, created))


def _asked(client: AsyncClient, asked: Question, *, stream: bool) -> AsyncStream:
    assert asked.prompt is not None
    return client.generate(asked.prompt, stream=stream, **asked.params)


def _answer(completion: Completion, name: str, model: str, asked: Question) -> TextCompletion:
    return text_completion(completion, asked.params, name, model)


async def _events(
    streams: list[AsyncStream], chunks: TextChunks, body: CompletionRequest, echoes: list[Echo]
) -> AsyncGenerator[bytes]:
    costs = []
    async for number, piece in merged(streams):
        first_index = number * (body.n or 1)
        said = echoes[number].chunks(chunks, piece, first_index) if echoes else chunks.take(piece, first_index)
        if piece.usage is not None:
            costs.append(echoes[number].cost(piece.usage) if echoes else piece.usage)
            if body.includes_usage and len(costs) == len(streams):
                said.append(chunks.total(_sum(costs)))
        if said:
            yield b"".join([event(encoded(chunk)) for chunk in said])


def _joined(answers: list[TextCompletion], costs: list[Usage], created: int) -> TextCompletion:
    """Several as one: the samples of the first prompt, and so on."""
    choices = [choice for answer in answers for choice in answer.choices]
    numbered = [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(choices)]
    return msgspec.structs.replace(answers[0], choices=numbered, usage=usage(_sum(costs)), created=created)


def _sum(costs: list[Usage]) -> Usage:
    return Usage(sum(cost.prompt_tokens for cost in costs), sum(cost.completion_tokens for cost in costs))
