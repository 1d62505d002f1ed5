"""LoadLimit: how much may wait, and what those are told who come then."""

from typing import Any

import pytest

from driver.errors import Overloaded
from driver.load_limit import LoadLimit
from driver.request import ActiveRequest, QueueChannel
from engine.config import EngineStats


def build_request(**fields: Any) -> ActiveRequest:
    """A request with these fields."""
    return ActiveRequest(request_id="a", channel=QueueChannel(), **fields)


def test_a_prompt_is_counted_or_estimated_before_it_is_tokenised() -> None:
    """Token ids exactly; of a text, or of the message that a conversation came in, a token for each four characters."""
    chat = build_request(messages=[{"role": "user", "content": "x"}], tools=[{"x": "y"}], num_bytes=40)
    resumed = build_request(prompt="y" * 8, resume_token_ids=[[1, 2], [3]], num_bytes=1000)

    requests = [build_request(prompt=[1, 2, 3]), build_request(prompt="y" * 8), chat, resumed]

    assert [request.estimated_tokens for request in requests] == [3, 3, 11, 6]


def test_beyond_either_bound_a_request_is_refused() -> None:
    """As many requests as may wait, or as many tokens; alone, a request may be longer than the bound."""
    limit = LoadLimit(3, 100)
    stats = EngineStats()

    limit.check(500, 0, 0, stats)
    limit.check(10, 2, 90, stats)
    with pytest.raises(Overloaded, match="3 requests wait already: try again in"):
        limit.check(1, 3, 3, stats)
    with pytest.raises(Overloaded, match="prompts of 95 tokens wait already, and 100 may"):
        limit.check(10, 1, 95, stats)


def test_the_hint_is_the_time_for_half_of_what_waits() -> None:
    """At the rate of the last seconds: 100 tokens a second, of which 1,000 wait; within half a second and a minute."""
    now = 0.0
    limit = LoadLimit(1, 1, clock=lambda: now)

    def hint(tokens: int, computed: int) -> float | None:
        with pytest.raises(Overloaded) as refusal:
            limit.check(1, 1, tokens, EngineStats(prompt_tokens=computed))
        return refusal.value.retry_after_s

    now = 10.0
    assert hint(1000, 1000) == 5.0
    now = 20.0
    assert [hint(1000, 2000), hint(10, 2000), hint(10**9, 2000)] == [5.0, 0.5, 60.0]
