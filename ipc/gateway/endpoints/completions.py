"""``/v1/completions``."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from driver.request import Usage
from ipc.async_client import AsyncClient
from ipc.gateway.access.memory_limit import held_by
from ipc.gateway.answers import encoded, json_answer
from ipc.gateway.asking import Answer, ask, prompt_token_ids, shown_prompt, tokenized
from ipc.gateway.bodies import read
from ipc.gateway.disconnect import unless_disconnected
from ipc.gateway.endpoints.echo import Echo, echoed
from ipc.gateway.endpoints.stream_usage import StreamUsage
from ipc.gateway.endpoints.text_chunks import TextChunks
from ipc.gateway.event_stream import EventStream, event
from ipc.gateway.request_id import request_id_of, traceparent_of
from ipc.gateway.streams import gathered, merged
from ipc.gateway.upstream.replicas import daemon_for
from ipc.openai.answer_bodies import TextCompletion, text_completion, total, usage
from ipc.openai.question import Question
from ipc.openai.request_bodies import CompletionRequest
from ipc.openai.timing_bodies import answer_timings


async def create(request: Request) -> Response:
    """Continue a text, or each of several."""
    body = await read(request, CompletionRequest)
    return await unless_disconnected(request.receive, _answered(request, body))


async def _answered(request: Request, body: CompletionRequest) -> Response:
    name, questions = request_id_of(request, body.request_id), body.questions()
    client = (await daemon_for(request, body.model)).client
    model, created, trace = body.model or client.welcome.model, int(time.time()), traceparent_of(request)
    questions = await asyncio.gather(*(tokenized(client, asked) for asked in questions))
    echoes: list[Echo] = []
    if body.echo:
        both = await asyncio.gather(*(echoed(client, asked, body) for asked in questions))
        questions, echoes = [asked for asked, _ in both], [echo for _, echo in both]
    prompts = await asyncio.gather(*(shown_prompt(client, asked) for asked in questions))
    answer_format, held = questions[0].answer_format, held_by(request)
    if body.stream:
        so_far = StreamUsage(await _num_prompt_tokens(client, questions, body), included=body.includes_usage)
        chunks = TextChunks(name, model, created, answer_format, so_far, prompts)
        streams = [ask(client, asked, held, traceparent=trace) for asked in questions]
        return EventStream(_events(streams, chunks, body, echoes))
    streams = [ask(client, asked, held, stream=False, traceparent=trace) for asked in questions]
    completions = await gathered(streams, held)
    answers = [
        text_completion(one, answer_format, name, model, prompt)
        for one, prompt in zip(completions, prompts, strict=True)
    ]
    costs = [completion.usage for completion in completions]
    if echoes:
        answers = [echo.before(*one) for echo, one in zip(echoes, zip(completions, answers, strict=True), strict=True)]
        costs = [echo.cost(cost) for echo, cost in zip(echoes, costs, strict=True)]
    return json_answer(_joined(answers, costs, created))


async def _num_prompt_tokens(client: AsyncClient, questions: list[Question], body: CompletionRequest) -> int | None:
    """Those of all prompts, if chunks have the usage so far."""
    if not body.continues_usage:
        return None
    return sum(map(len, await asyncio.gather(*(prompt_token_ids(client, asked) for asked in questions))))


async def _events(
    streams: list[Answer], chunks: TextChunks, body: CompletionRequest, echoes: list[Echo]
) -> AsyncGenerator[bytes]:
    costs = []
    async for number, piece in merged(streams):
        place = number, number * (body.n or 1)
        said = echoes[number].chunks(chunks, piece, *place) if echoes else chunks.take(piece, *place)
        if piece.usage is not None:
            costs.append(echoes[number].cost(piece.usage) if echoes else piece.usage)
            if body.includes_usage and len(costs) == len(streams):
                said.append(chunks.total(costs))
        if said:
            yield b"".join([event(encoded(chunk)) for chunk in said])


def _joined(answers: list[TextCompletion], costs: list[Usage], created: int) -> TextCompletion:
    """Several as one: the samples of the first prompt, and so on."""
    choices = [choice for answer in answers for choice in answer.choices]
    numbered = [msgspec.structs.replace(choice, index=index) for index, choice in enumerate(choices)]
    return msgspec.structs.replace(
        answers[0], choices=numbered, usage=usage(total(costs)), timings=answer_timings(costs), created=created
    )
