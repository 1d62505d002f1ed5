"""Rounds over the clients of a socket: everybody in PING_INTERVAL, and few at a time."""

import math
import random
from collections import Counter

import pytest

from ipc.server.work.rounds import LOOKED_AFTER_AT_ONCE, Rounds
from ipc.wire.messages import PING_INTERVAL


def build_round(num_clients: int) -> tuple[Rounds, list[bytes]]:
    """Rounds that have begun at 1000.0, and so many clients."""
    rounds, clients = Rounds(), [number.to_bytes(6, "big") for number in range(num_clients)]
    assert rounds.take(clients, now=1000.0)
    return rounds, clients


@pytest.mark.parametrize("num_clients", [1, 64, 65, 100, 8000])
def test_everybody_has_a_turn_in_each_interval_and_few_at_a_time(num_clients: int) -> None:
    """Whether or not their number is a multiple."""
    rounds, clients = build_round(num_clients)
    now, turns, most = 1000.0, Counter[bytes](), 0

    while now < 1000.0 + 10 * PING_INTERVAL:
        now += rounds.interval(num_clients)
        taken = rounds.take(clients, now)
        turns.update(taken)
        most = max(most, len(taken))

    assert set(turns) == set(clients) and set(turns.values()) <= {9, 10, 11}
    assert most <= LOOKED_AFTER_AT_ONCE + 1  # which times that are no binary fractions round up


def test_nobody_has_a_turn_before_the_time_and_none_is_kept_for_nobody() -> None:
    """A call between two turns does nothing."""
    rounds, clients = build_round(100)

    assert rounds.take(clients, now=1000.0 + 0.9 * rounds.interval(100)) == []
    assert rounds.take([], now=2000.0) == []
    assert rounds.interval(0) == math.inf


def test_a_thread_that_comes_late_takes_more_at_a_time() -> None:
    """So that a busy one does not find the silent later."""
    rounds, clients = build_round(8000)
    now, turns = 1000.0, Counter[bytes]()

    for _ in range(50):
        now += PING_INTERVAL / 10
        turns.update(rounds.take(clients, now))

    assert set(turns) == set(clients) and set(turns.values()) <= {4, 5, 6}
    assert rounds.present_since == 1000.0


def test_after_a_pause_nobody_was_silent_and_few_are_looked_after() -> None:
    """It was this process that was not there."""
    rounds, clients = build_round(8000)

    assert len(rounds.take(clients, now=1000.0 + 3.1 * PING_INTERVAL)) == LOOKED_AFTER_AT_ONCE
    assert rounds.present_since == 1000.0 + 3.1 * PING_INTERVAL


def test_clients_come_and_go_and_those_that_stay_have_their_turns() -> None:
    """In every two intervals, whoever joins or leaves meanwhile."""
    draw, rounds = random.Random(1), Rounds()
    clients = dict.fromkeys(number.to_bytes(6, "big") for number in range(1000))
    since = dict.fromkeys(clients, 1000.0)
    now, serial = 1000.0, 1000
    while now < 1000.0 + 20 * PING_INTERVAL:
        now += rounds.interval(len(clients))
        for identity in rounds.take(clients, now):
            if identity in clients:
                since[identity] = now
        for identity in draw.sample(list(clients), 20):
            del clients[identity], since[identity]
        for _ in range(draw.randrange(41)):
            serial += 1
            identity = serial.to_bytes(6, "big")
            clients[identity], since[identity] = None, now
        assert now - min(since.values(), default=now) <= 2 * PING_INTERVAL + 0.5
