"""The open requests as an operator sees them: their state and progress, and nothing they hold."""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from driver.open_requests import OpenRequest
from driver.request import RequestOrder
from engine.scheduling.sequence import Sequence, SequenceStatus

REQUEST_STATES = ("decode", "prefill", "preempted", "waiting", "grammar", "queued", "ending")
"""The most advanced first. A ``queued`` request waits to be tokenised, or is; ``grammar`` is one
whose grammar is compiled; ``waiting`` is for a slot or pages; ``ending`` is for its last sample."""


class RequestRow(msgspec.Struct, frozen=True):
    """One open request. Tokens of a ``queued`` one's prompt are an estimate."""

    id: str
    """As ``abort`` takes it."""
    client: str
    user: str
    model: str
    """Its adapter; "" is the model itself."""
    state: str
    """The most advanced state of its samples."""
    age_s: float
    prompt_tokens: int
    completion_tokens: int
    """Of all its samples, with those that it resumes."""
    tokens_per_second: float
    """Since its first token; 0 before the second."""


def listed(
    requests: Iterable[OpenRequest], now: float, order: RequestOrder, limit: int | None, client: str | None
) -> tuple[list[RequestRow], int]:
    """The first ``limit`` requests, of one client perhaps, and how many there are. Any thread.

    Only those that are listed cost a row.
    """
    those = [request for request in requests if client in (None, request.request.client)]
    first = heapq.nsmallest(len(those) if limit is None else limit, those, key=lambda at: _ORDERS[order](at, now))
    return [_row(request, now) for request in first], len(those)


_ORDERS: dict[RequestOrder, Callable[[OpenRequest, float], Any]] = {
    "age": lambda request, _: request.received_at,
    "tokens": lambda request, _: -_num_tokens(request),
    "rate": lambda request, now: -_rate(request, now),
    "client": lambda request, _: (*request.holder, request.received_at),
}


def _num_tokens(request: OpenRequest) -> int:
    return sum([len(sequence.output_token_ids) for sequence in request.sequences])


def _rate(request: OpenRequest, now: float) -> float:
    first_at = request.first_token_at
    return 0.0 if first_at is None or now <= first_at else (request.num_new_tokens - 1) / (now - first_at)


def _row(request: OpenRequest, now: float) -> RequestRow:
    sequences = request.sequences
    return RequestRow(
        id=request.request_id,
        client=request.request.client,
        user=request.request.user,
        model="" if request.adapter is None else request.adapter.name,
        state=min(map(_state, sequences), key=REQUEST_STATES.index, default="queued"),
        age_s=now - request.received_at,
        prompt_tokens=len(sequences[0].prompt_token_ids) if sequences else request.num_prompt_tokens,
        completion_tokens=_num_tokens(request),
        tokens_per_second=_rate(request, now),
    )


def _state(sequence: Sequence) -> str:
    if sequence.status is SequenceStatus.FINISHED:
        return "ending"
    if sequence.status is SequenceStatus.RUNNING:
        return "prefill" if sequence.prefilling else "decode"
    if sequence.has_begun:
        return "preempted"
    return "grammar" if sequence.params.structured_outputs is not None and sequence.constraint is None else "waiting"
