"""Quotas: work is charged when it is done, whether or not anybody stays to hear of it."""

import gc
import threading
import weakref

import pytest
from fake_driver import WELCOME, FakeDriver

from driver.request import ActiveRequest, RequestError, ReturnSample, Usage
from ipc.server.outbox import Outbox, Reply
from ipc.server.work.client_table import Clients
from ipc.server.work.ledger import Ledger
from ipc.sockets.peer_events import Sent
from ipc.sockets.tenants import MINUTE, Quota, Tenant
from ipc.wire.bell import Bell
from ipc.wire.codec import encode
from ipc.wire.keys import Limits
from ipc.wire.messages import PROTOCOL_VERSION, Abort, Error, Generate, Hello, ServerMessage


def build_tenant(tokens_per_minute: int | None = 600, max_requests: int | None = None) -> Tenant:
    """The bearer of a key with these limits."""
    return Tenant("bob", Limits("x" * 40, max_requests=max_requests, tokens_per_minute=tokens_per_minute))


def build_reply() -> Reply:
    """The way back of one request."""
    return Reply(Outbox(Bell()), b"c", "a")


class Wire:
    """Clients of one tenant over connections that take whatever they are sent."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.driver = FakeDriver()
        self.outbox = Outbox(Bell())
        self.said: list[ServerMessage] = []
        self.clients = Clients(self.driver, WELCOME, self.outbox, self._send)

    def hear(self, message: object, identity: bytes = b"c", now: float = 0.0) -> None:
        self.clients.hear(identity, [encode(message)], now, self.tenant)

    def ask(self, prompt: list[int], identity: bytes = b"c", now: float = 0.0) -> ActiveRequest | Error:
        """The request that the driver was given, or why it was not."""
        num_submitted = len(self.driver.submitted)
        self.hear(Generate(f"{num_submitted}", prompt=prompt), identity, now)
        if len(self.driver.submitted) > num_submitted:
            return self.driver.submitted[-1]
        refusal = self.said[-1]
        assert isinstance(refusal, Error)
        return refusal

    def deliver(self, now: float = 0.0) -> None:
        for reply, sample in self.outbox.take():
            self.clients.deliver(reply, sample, now)

    def _send(self, identity: bytes, message: ServerMessage) -> Sent:
        del identity
        self.said.append(message)
        return Sent.AWAY


def test_a_prompt_is_charged_when_its_request_is_taken() -> None:
    """Before anything has come of it, and whatever connection the next request comes over."""
    wire = Wire(build_tenant())
    for identity in (b"c", b"d"):
        wire.hear(Hello(PROTOCOL_VERSION), identity)

    assert isinstance(wire.ask([1] * 600), ActiveRequest)

    refusal = wire.ask([1], b"d")
    assert isinstance(refusal, Error)
    assert refusal.code == "quota_exceeded"


@pytest.mark.parametrize("stream", [True, False])
def test_output_is_charged_as_it_is_made(stream: bool) -> None:
    """Before it is delivered, and also where it is to be delivered whole."""
    tenant, ledger = build_tenant(), Ledger()
    reply = Reply(Outbox(Bell()), b"c", "a", stream=stream)
    ledger.open(tenant, reply, 10, now=0.0)
    assert ledger.refusal(tenant, now=0.0) is None

    for _ in range(60):
        reply.put(ReturnSample(request_id="a", token_ids=[1] * 10))

    assert ledger.refusal(tenant, now=0.0) is not None


def test_a_tokenizers_request_costs_nothing() -> None:
    """A gateway asks for some by itself, of a prompt that is charged already; who has used all may still ask."""
    tenant, ledger, counting = build_tenant(), Ledger(), build_reply()
    ledger.open(tenant, counting, None, now=0.0)
    counting.put(ReturnSample(request_id="a", token_ids=[1] * 600))
    assert ledger.refusal(tenant, now=0.0) is None
    ledger.close(counting, Usage(600, 0))
    assert ledger.refusal(tenant, now=0.0) is None

    ledger.open(tenant, build_reply(), 600, now=0.0)

    assert ledger.refusal(tenant, now=0.0) is not None
    assert ledger.refusal(tenant, now=0.0, spends=False) is None


def test_output_is_charged_that_was_made_before_its_request_was_open() -> None:
    """The driver may be quicker than the ledger."""
    tenant, ledger, reply = build_tenant(), Ledger(), build_reply()
    reply.put(ReturnSample(request_id="a", token_ids=[1] * 600))
    ledger.open(tenant, reply, 10, now=0.0)

    assert ledger.refusal(tenant, now=0.0) is not None


def test_only_requests_that_have_made_something_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is open besides; all that was made is charged, once, and the end of one is no other's affair."""
    tenant, ledger, spent = build_tenant(), Ledger(), list[int]()
    replies = [build_reply() for _ in range(100)]
    for reply in replies:
        ledger.open(tenant, reply, 0, now=0.0)
    assert ledger.refusal(tenant, now=0.0) is None
    monkeypatch.setattr(Quota, "spend", lambda self, tokens: spent.append(tokens))

    ledger.refusal(tenant, now=0.0)
    assert spent == []
    for reply in [*replies[:2], replies[0]]:
        reply.put(ReturnSample(request_id="a", token_ids=[1] * 10))
    ledger.refusal(tenant, now=0.0)
    assert sorted(spent) == [10, 20]
    replies[1].put(ReturnSample(request_id="a", token_ids=[1] * 5))
    replies[2].put(ReturnSample(request_id="a", token_ids=[1] * 7))
    ledger.close(replies[0], None)
    ledger.close(replies[1], Usage(1, 16))
    assert sorted(spent) == [0, 7, 10, 20]
    ledger.refusal(tenant, now=0.0)
    assert sorted(spent) == [0, 7, 7, 10, 20]


def test_output_counts_once_tokens_are_limited() -> None:
    """A key that gets such a limit has used what its open requests have made; without one nothing of ended requests is
    held."""
    ledger, open_one, ended = Ledger(), build_reply(), build_reply()
    for reply in (open_one, ended):
        ledger.open(build_tenant(None), reply, 10, now=0.0)
        reply.put(ReturnSample(request_id="a", token_ids=[1] * 300))
    assert ledger.refusal(build_tenant(None), now=0.0) is None
    ledger.close(ended, None)
    ended.put(ReturnSample(request_id="a", token_ids=[1]))
    trace = weakref.ref(ended)
    del ended, reply
    gc.collect()

    assert trace() is None
    assert ledger.refusal(build_tenant(621), now=0.0) is None
    assert ledger.refusal(build_tenant(620), now=0.0) is not None


def test_output_of_several_threads_is_charged_whole() -> None:
    """Threads put while others are charged, and nothing is missed or counted twice."""
    tenant, ledger = build_tenant(10**9), Ledger()
    replies = [build_reply() for _ in range(8)]
    for reply in replies:
        ledger.open(tenant, reply, 0, now=0.0)

    def make(reply: Reply) -> None:
        for _ in range(2000):
            reply.put(ReturnSample(request_id="a", token_ids=[1]))

    threads = [threading.Thread(target=make, args=(reply,)) for reply in replies]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert ledger.refusal(tenant, now=0.0) is None
    assert ledger.refusal(tenant, now=0.0) is None

    assert ledger.refusal(build_tenant(16_001), now=0.0) is None
    assert ledger.refusal(build_tenant(16_000), now=0.0) is not None


def test_who_hangs_up_pays_for_what_is_done_until_the_end() -> None:
    """Saying hello again, or vanishing, forgives nothing: prompt and output count until the abort has ended the work."""
    wire = Wire(build_tenant(tokens_per_minute=10_000))
    total = 0
    for _ in range(100):
        wire.hear(Hello(PROTOCOL_VERSION))
        request = wire.ask([1] * 900)
        if isinstance(request, Error):
            break
        del wire.driver.open[request.request_id]
        wire.driver.say(request, "x", [1] * 50)
        wire.hear(Hello(PROTOCOL_VERSION))  # which aborts it
        wire.driver.say(request, "x", [1] * 50)
        end = ReturnSample(request_id=request.request_id, finish_reason="abort", usage=Usage(900, 100))
        request.channel.put(end)
        wire.deliver()
        total += 1000

    assert total == 10_000


def test_the_last_sample_corrects_the_estimate() -> None:
    """Up or down; an error has no numbers, and leaves the charge as it was."""
    for usage, left in ((Usage(100, 0), 500), (Usage(500, 50), 50), (None, 300)):
        tenant, ledger, reply = build_tenant(), Ledger(), build_reply()
        ledger.open(tenant, reply, 300, now=0.0)
        ledger.close(reply, usage)

        ledger.open(tenant, build_reply(), left - 1, now=0.0)
        assert ledger.refusal(tenant, now=0.0) is None
        ledger.open(tenant, build_reply(), 1, now=0.0)
        assert ledger.refusal(tenant, now=0.0) is not None


def test_a_request_is_open_until_its_work_has_ended() -> None:
    """An abort that is under way counts among those that a key may have at once."""
    wire = Wire(build_tenant(None, max_requests=1))
    wire.hear(Hello(PROTOCOL_VERSION))
    request = wire.ask([1])
    assert isinstance(request, ActiveRequest)
    wire.hear(Abort("0"))

    assert isinstance(wire.ask([1]), Error)
    wire.deliver()
    assert isinstance(wire.ask([1]), ActiveRequest)


def test_an_error_closes_a_request() -> None:
    """It is open no more, whoever was to hear of it."""
    wire = Wire(build_tenant(None, max_requests=1))
    wire.hear(Hello(PROTOCOL_VERSION))
    request = wire.ask([1])
    assert isinstance(request, ActiveRequest)
    wire.hear(Hello(PROTOCOL_VERSION))
    wire.outbox.take()
    request.channel.put(ReturnSample(request_id=request.request_id, error=RequestError("internal", "broken")))
    wire.deliver()

    assert isinstance(wire.ask([1]), ActiveRequest)


def test_limits_of_now_hold() -> None:
    """As they were read again with the keys, for what was used before too."""
    ledger = Ledger()
    ledger.open(build_tenant(600), build_reply(), 500, now=0.0)

    assert ledger.refusal(build_tenant(600), now=0.0) is None
    assert ledger.refusal(build_tenant(400), now=0.0) is not None
    assert ledger.refusal(build_tenant(None), now=0.0) is None


def test_accounts_that_have_drained_are_forgotten() -> None:
    """So that names that come and go with the keys leave nothing behind; one with something open or used stays."""
    ledger, reply = Ledger(), build_reply()
    ledger.open(build_tenant(), reply, 300, now=1000.0)
    ledger.forget(now=1000.0 + MINUTE)
    assert len(ledger) == 1
    ledger.close(reply, Usage(300, 300))
    ledger.forget(now=1000.0 + MINUTE / 2)
    assert len(ledger) == 1

    ledger.forget(now=1000.0 + MINUTE)
    assert len(ledger) == 0


def test_a_new_account_begins_with_what_is_used_now() -> None:
    """The clock's own zero, long ago, has drained nothing."""
    ledger, tenant = Ledger(), build_tenant()
    ledger.open(tenant, build_reply(), 700, now=1e6)

    assert ledger.refusal(tenant, now=1e6) is not None
