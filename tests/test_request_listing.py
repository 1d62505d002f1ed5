"""The listing of open requests: those that come first, in each order, and rows of those alone."""

import random

import pytest
from test_scheduler import build_sequence

from driver.metrics import request_listing
from driver.metrics.request_listing import RequestRow, listed
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, QueueChannel, RequestOrder

NOW = 1000.0
ORDERS: dict[RequestOrder, object] = {
    "age": lambda row: -row.age_s,
    "tokens": lambda row: -row.completion_tokens,
    "rate": lambda row: -row.tokens_per_second,
    "client": lambda row: (row.client, row.user, -row.age_s),
}


def build_requests(count: int) -> list[OpenRequest]:
    """Of several clients, with tokens or without."""
    draw, requests = random.Random(1), []
    for number in range(count):
        client, user = draw.choice("abc"), draw.choice(("", "u"))
        request = ActiveRequest(request_id=str(number), channel=QueueChannel(), prompt="x", client=client, user=user)
        opened = OpenRequest(request, str(number), received_at=NOW - count + draw.randrange(9) + number)
        if draw.random() < 0.7:
            opened.sequences = [build_sequence(str(number), 3, 99) for _ in range(draw.randrange(1, 3))]
            for sequence in opened.sequences:
                sequence.output_token_ids = [1] * draw.randrange(20)
                opened.num_new_tokens += len(sequence.output_token_ids)
            opened.first_token_at = opened.received_at + 1.0 if opened.num_new_tokens else None
        requests.append(opened)
    return requests


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("client", [None, "b", "nobody"])
def test_the_first_are_those_of_all_rows_in_order(order: RequestOrder, client: str | None) -> None:
    """Whatever the limit, and equal ones in the order in which they came."""
    requests = build_requests(60)
    everything, total = listed(requests, NOW, "age", None, client)
    of_all = {row.id: row for row in everything}
    by_arrival = [of_all[request.request_id] for request in requests if request.request_id in of_all]
    expected = sorted(by_arrival, key=ORDERS[order])  # type: ignore[arg-type]

    for limit in (None, 1, 7, 100):
        assert listed(requests, NOW, order, limit, client) == (expected[:limit], total)


def test_only_those_that_are_listed_cost_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of whom there are too many."""
    rows: list[RequestRow] = []
    build = request_listing._row
    monkeypatch.setattr(request_listing, "_row", lambda *given: rows.append(build(*given)) or rows[-1])

    assert len(listed(build_requests(60), NOW, "tokens", 5, None)[0]) == len(rows) == 5
