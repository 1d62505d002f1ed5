"""LoadLimit: how much may wait, and what those are told who come then."""

import pytest

from driver.errors import Overloaded
from driver.load_limit import LoadLimit, estimated_tokens
from driver.request import ActiveRequest, QueueChannel
from engine.config import EngineStats


def build_request(prompt: str | list[int]) -> ActiveRequest:
    """A request for this prompt."""
    return ActiveRequest(request_id="a", channel=QueueChannel(), prompt=prompt)


def test_a_prompt_is_counted_or_estimated_before_it_is_tokenised() -> None:
    """Token ids exactly; of a text or of messages, a token for each four characters."""
    chat = ActiveRequest(request_id="a", channel=QueueChannel(), messages=[{"role": "user", "content": "x" * 40}])

    assert [estimated_tokens(request) for request in (build_request([1, 2, 3]), build_request("y" * 8), chat)] == [
        3,
        3,
        11,
    ]


def test_beyond_either_bound_a_request_is_refused() -> None:
    """As many requests as may wait, or as many tokens; alone, a request may be longer than the bound."""
    limit = LoadLimit(3, 100)
    stats = EngineStats()

    limit.check(build_request([1] * 500), 0, 0, stats)
    limit.check(build_request([1] * 10), 2, 90, stats)
    with pytest.raises(Overloaded, match="3 requests wait already: try again in"):
        limit.check(build_request([1]), 3, 3, stats)
    with pytest.raises(Overloaded, match="prompts of 95 tokens wait already, and 100 may"):
        limit.check(build_request([1] * 10), 1, 95, stats)


def test_the_hint_is_the_time_for_half_of_what_waits() -> None:
    """At the rate of the last seconds: 100 tokens a second, of which 1,000 wait; within half a second and a minute."""
    now = 0.0
    limit = LoadLimit(1, 1, clock=lambda: now)

    def hint(tokens: int, computed: int) -> float | None:
        with pytest.raises(Overloaded) as refusal:
            limit.check(build_request([1]), 1, tokens, EngineStats(prompt_tokens=computed))
        return refusal.value.retry_after_s

    now = 10.0
    assert hint(1000, 1000) == 5.0
    now = 20.0
    assert [hint(1000, 2000), hint(10, 2000), hint(10**9, 2000)] == [5.0, 0.5, 60.0]
