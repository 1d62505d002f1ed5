"""LoadLimit: how much may wait, and what those are told who come then."""

import random
from contextlib import suppress
from typing import Any

import pytest

from driver.errors import Overloaded
from driver.load_limit import LoadLimit, TokenizerLimit
from driver.open_requests import OpenRequest
from driver.request import ActiveRequest, QueueChannel, ReturnSample, TokenizerRequest, Usage
from driver.stages.fair_share import Holdings, most
from engine.metrics.engine_stats import EngineStats


def build_request(**fields: Any) -> ActiveRequest:
    """A request with these fields."""
    return ActiveRequest(request_id="a", channel=QueueChannel(), **fields)


def build_waiting(num_tokens: int = 1, client: str = "", user: str = "") -> OpenRequest:
    """A request that waits, with a prompt of so many tokens."""
    request = build_request(prompt=[1], client=client, user=user)
    return OpenRequest(request, "a#1", num_prompt_tokens=num_tokens)


def build_limit(requests: int, tokens: int, waiting: list[OpenRequest]) -> LoadLimit:
    """A limit, and what waits already."""
    limit = LoadLimit(requests, tokens, EngineStats)
    for request in waiting:
        limit.enter(request)
    return limit


def fill(limit: LoadLimit, client: str, user: str = "", num_tokens: int = 1) -> list[OpenRequest]:
    """Have this one submit requests until one is refused; those that were taken."""
    taken: list[OpenRequest] = []
    with suppress(Overloaded):
        while True:
            new = build_waiting(num_tokens, client, user)
            limit.enter(new)
            taken.append(new)
    return taken


def test_a_prompt_is_counted_or_estimated_before_it_is_tokenised() -> None:
    """Token ids exactly; of a text, or of the message that a conversation came in, a token for each four characters."""
    chat = ActiveRequest(request_id="a", channel=QueueChannel(), messages=[{"role": "user"}], num_bytes=40)
    resumed = ActiveRequest(
        request_id="a", channel=QueueChannel(), prompt="y" * 8, resume_token_ids=[[1, 2], [3]], num_bytes=1000
    )

    requests = [build_request(prompt=[1, 2, 3]), build_request(prompt="y" * 8), chat, resumed]

    assert [request.estimated_tokens for request in requests] == [3, 3, 11, 6]


def test_beyond_either_bound_a_request_is_refused() -> None:
    """As many requests as may wait, or as many tokens; alone, a request may be longer than the bound."""
    build_limit(3, 100, [build_waiting(500)])
    build_limit(3, 100, [build_waiting(45), build_waiting(45), build_waiting(10)])
    with pytest.raises(Overloaded, match="3 requests wait already: try again in"):
        build_limit(3, 100, [build_waiting() for _ in range(3)]).enter(build_waiting())
    with pytest.raises(Overloaded, match="prompts of 95 tokens wait already, and 100 may"):
        build_limit(3, 100, [build_waiting(95)]).enter(build_waiting(10))


def test_who_waits_no_longer_leaves_room_once() -> None:
    """However often it is said, and whoever was refused and never counted takes none away."""
    requests = [build_waiting(client=client) for client in ("a", "a", "b")]
    limit = build_limit(3, 100, requests)
    with pytest.raises(Overloaded):
        limit.enter(refused := build_waiting(client="c"))

    for request in (refused, requests[0], requests[0], refused):
        limit.leave(request)

    assert len(fill(limit, "c")) == 1


@pytest.mark.parametrize("what", ["requests", "tokens"])
def test_who_is_alone_may_fill_the_room_and_others_still_get_in(what: str) -> None:
    """An eighth more is for those who have less than their part; then nobody gets in."""
    limit = LoadLimit(64, 10**6, EngineStats) if what == "requests" else LoadLimit(10**6, 64, EngineStats)

    assert [len(fill(limit, client)) for client in ("hog", "late", "later")] == [64, 8, 0]


def test_in_the_fuller_half_nobody_takes_more_than_their_part() -> None:
    """A client that has it is refused, by name of its number, while one that has nothing gets in."""
    limit = build_limit(64, 10**6, [build_waiting(client=str(number)) for number in range(3)])

    assert len(fill(limit, "hog")) == 29  # up to half of the room it is whoever comes first
    with pytest.raises(Overloaded, match="29 requests of yours wait already, and others' too: 16 is your part"):
        limit.enter(build_waiting(client="hog"))
    assert len(fill(limit, "late")) == 64 // 5


def test_a_client_gains_nothing_by_inventing_users() -> None:
    """Its users share its part: with as many as it likes it has no more than an eighth above that."""
    limit = LoadLimit(64, 10**6, EngineStats)
    others = fill(limit, "other")
    assert len(others) == 64
    for request in others[32:]:
        limit.leave(request)

    taken = [len(fill(limit, "hog", str(number))) for number in range(100)]

    assert sum(taken) == 36
    assert fill(limit, "late")


def test_users_of_one_client_do_not_lock_each_other_out() -> None:
    """Those behind one gateway: one fills the room, and the others still get in."""
    limit = LoadLimit(64, 10**6, EngineStats)

    assert len(fill(limit, "gateway", "hog")) == 64
    assert fill(limit, "gateway", "late")


def test_the_first_prompt_of_a_client_may_be_longer_than_its_part() -> None:
    """Where there is room for it: it would otherwise wait for a room that others keep half full."""
    waiting = [build_waiting(300, "a"), build_waiting(100, "b")]

    build_limit(64, 1000, waiting).enter(build_waiting(600, "c"))
    with pytest.raises(Overloaded, match="your prompts of 300 tokens wait already, and others' too: 500 is your part"):
        build_limit(64, 1000, waiting).enter(build_waiting(600, "a"))


def test_whatever_is_asked_the_room_has_a_bound() -> None:
    """Random clients and users: never more than an eighth above it, and never less than it if anybody asks for more."""
    draw = random.Random(3)
    for size in (1, 2, 7, 64):
        limit, waiting = LoadLimit(size, 10**6, EngineStats), []
        for _ in range(40 * size):
            waiting += fill(limit, str(draw.randrange(size + 1)), str(draw.randrange(3)))
            assert size // 2 <= len(waiting) <= most(size)
            for request in list(waiting):
                if draw.random() < 0.1:
                    waiting.remove(request)
                    limit.leave(request)


def test_counts_are_those_of_all_that_wait() -> None:
    """After any history of what holders take and give back, a share is that of the sums."""
    draw, holdings, held = random.Random(5), Holdings(), list[tuple[tuple[str, str], int]]()
    for _ in range(2000):
        holder = (draw.choice("abc"), draw.choice("xyz"))
        if held and draw.random() < 0.5:
            other, amount = held.pop(draw.randrange(len(held)))
            holdings.give_back(amount, other)
        else:
            held.append((holder, amount := draw.randrange(1, 12)))
            holdings.take(amount, holder)
        clients = {client for (client, _), _ in held} | {holder[0]}
        users = {user for (client, user), _ in held if client == holder[0]} | {holder[1]}

        found = holdings.share(100, 5, holder)

        assert found.total == sum(amount for _, amount in held)
        assert found.own == sum(amount for other, amount in held if other == holder)
        assert found.part == max(1, 100 // len(clients) // len(users))


def test_tokenizer_requests_have_a_room_of_their_own() -> None:
    """By the same parts, and they count until they are answered, or could not be queued."""
    limit, queued = TokenizerLimit(8), []

    def ask(client: str) -> int:
        count = 0
        with suppress(Overloaded):
            while True:
                request = TokenizerRequest(request_id="a", channel=QueueChannel(), prompt="x", client=client)
                limit.submit(request, queued.append)
                count += 1
        return count

    assert (ask("hog"), ask("late"), ask("hog")) == (8, 1, 0)
    for request in queued[:8]:
        request.channel.put(ReturnSample(request_id="a", finish_reason="stop", usage=Usage(1, 0)))
    with pytest.raises(ZeroDivisionError):
        limit.submit(queued[0], lambda _: 1 // 0)
    assert ask("hog") >= 3


class Load:
    """A limit of one request, in a world of its own time, whose engine computes so many tokens a second."""

    def __init__(self) -> None:
        self.now, self.computed = 0.0, 0
        self.limit = LoadLimit(1, 1, lambda: EngineStats(prompt_tokens=self.computed), lambda: self.now)

    def run(self, seconds: float, rate: int) -> None:
        """Let time pass."""
        self.now += seconds
        self.computed += int(seconds * rate)

    def wait(self, seconds: float, rate: int, tokens: int = 1) -> None:
        """The same while a request waits."""
        self.limit.enter(waits := build_waiting(tokens))
        self.run(seconds, rate)
        self.limit.leave(waits)

    def hint(self, tokens: int) -> float | None:
        """What those are told who come while so many tokens wait, as of now."""
        self.limit.enter(waits := build_waiting(tokens))
        with pytest.raises(Overloaded) as refusal:
            self.limit.enter(build_waiting())
        self.limit.leave(waits)
        return refusal.value.retry_after_s


def test_the_hint_is_the_time_for_half_of_what_waits() -> None:
    """At the rate of the last seconds: 100 tokens a second, of which 1,000 wait; within half a second and a minute."""
    load = Load()
    load.wait(10, rate=100)

    assert [load.hint(tokens) for tokens in (1000, 10, 10**9)] == [5.0, 0.5, 60.0]


def test_the_rate_is_that_of_times_in_which_requests_waited() -> None:
    """An hour in which few came, and short ones waited a moment each, does not make it slow."""
    load = Load()
    for _ in range(100):
        load.wait(0.1, rate=10_000)
        load.run(35.9, rate=30)

    assert load.hint(100_000) == 5.0


def test_the_rate_is_the_recent_one() -> None:
    """Of the last five to ten seconds, also while nobody is refused."""
    load = Load()
    for _ in range(60):
        load.wait(1, rate=10)
    for _ in range(12):
        load.wait(1, rate=1000)

    assert load.hint(10_000) == 5.0


def test_a_pause_is_no_slow_engine() -> None:
    """An operator's, in which requests wait and nothing is computed; a second without a token is."""
    load = Load()
    load.wait(10, rate=1000)
    load.wait(600, rate=0)
    load.wait(1, rate=1000)
    assert load.hint(10_000) == 5.0

    load.wait(4, rate=0)
    assert load.hint(10_000) == 25.0


def test_before_there_is_a_rate_the_hint_is_short() -> None:
    """The first burst of all is soon told more."""
    load = Load()
    assert load.hint(100_000) == 0.5

    load.wait(2, rate=10_000)
    assert load.hint(100_000) == 5.0
