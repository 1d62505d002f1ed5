"""Which connections the process of a socket has, and whose they are."""

import random
from collections import Counter

from ipc.sockets.connections.connection_table import KEPT, SHARE_OF_OWNER, SHARE_OF_PEER, Connections

ALICE, BOB = "uid 1000", "uid 1001"


def build_connections(limit: int = 100) -> Connections:
    """So many may be there at once."""
    return Connections(limit)


def connect(connections: Connections, descriptor: int, peer: str = ALICE) -> int:
    """Somebody is accepted and shakes hands; the serial given."""
    assert connections.accept(descriptor, peer, now=0.0) is None
    return connections.new_serial()


def test_a_connection_is_whoever_was_accepted_at_its_descriptor() -> None:
    """By its key if it has one, and else by the user or the machine that the kernel names."""
    connections = build_connections()
    first, second = connect(connections, 7, ALICE), connect(connections, 8, BOB)

    met = connections.add(first, 7, b"\0abcd", "", has_name=False)
    keyed = connections.add(second, 8, b"\0abce", "KEY", has_name=False)

    assert met is not None
    assert keyed is not None
    assert (met[0].owner, keyed[0].owner) == (ALICE, "key KEY")
    assert connections.get(first) == met


def test_late_words_of_a_connection_that_has_gone_are_nobodys() -> None:
    """Not those of the one that got its descriptor, though both have the same routing id and come from one machine."""
    connections = build_connections()
    gone = connect(connections, 7)
    connections.disconnect(7)
    assert connections.add(gone, 7, b"same", "", has_name=False) is None

    here = connect(connections, 7)

    assert connections.add(gone, 7, b"same", "", has_name=False) is None
    assert connections.add(here, 7, b"same", "", has_name=False) is not None
    assert connections.get(gone) is None


def test_the_next_with_a_routing_id_is_another() -> None:
    """It has a serial of its own, and the one before it has none any more."""
    connections = build_connections()
    first = connect(connections, 7)
    connections.add(first, 7, b"same", "", has_name=False)

    ended = connections.disconnect(7)
    second = connect(connections, 9)
    connections.add(second, 9, b"same", "", has_name=False)

    assert ended is not None
    assert ended.serial == first
    assert connections.get(first) is None
    assert connections.get(second) is not None


def test_a_connection_that_chooses_its_name_is_refused() -> None:
    """In words."""
    connections = build_connections()

    met = connections.add(connect(connections, 7), 7, b"demo", "", has_name=True)

    assert met is not None
    assert met[0].refusal is not None
    assert met[0].refusal[0] == "invalid_request"


def test_one_owner_has_a_share_of_the_connections_and_others_have_theirs() -> None:
    """One too many is refused in words, and has room again when another has gone."""
    limit = 40
    connections = build_connections(limit)

    def refusal(descriptor: int, peer: str) -> str | None:
        met = connections.add(connect(connections, descriptor, peer), descriptor, b"\0abcd", "", has_name=False)
        assert met is not None
        return met[0].refusal and met[0].refusal[0]

    refusals = [refusal(descriptor, ALICE) for descriptor in range(limit // SHARE_OF_OWNER)]

    assert set(refusals) == {None}
    assert refusal(100, ALICE) == "overloaded"
    assert refusal(101, BOB) is None
    connections.disconnect(0)
    connections.disconnect(100)
    assert refusal(102, ALICE) is None


def test_nobody_takes_all_descriptors_whatever_they_say() -> None:
    """One user or machine has half of them; of those who say nothing the oldest goes, and else the new one."""
    limit = 8
    connections = build_connections(limit)
    half = limit // SHARE_OF_PEER
    for descriptor in range(half):
        serial = connect(connections, descriptor)
        if descriptor != 1:
            connections.add(serial, descriptor, b"\0abcd", "", has_name=False)

    closed = [connections.accept(descriptor, ALICE, 0.0) for descriptor in (10, 11)]

    assert [accepted and accepted.descriptor for accepted in closed] == [1, 10]
    for descriptor in (1, 10):
        connections.disconnect(descriptor)
    assert connections.add(connections.new_serial(), 11, b"\0abcd", "", has_name=False) is not None
    full = connections.accept(12, ALICE, 0.0)
    assert full is not None
    assert full.descriptor == 12


def test_when_all_descriptors_are_taken_who_has_most_gives_one() -> None:
    """Of theirs that have said nothing, so that another user gets in."""
    connections = build_connections(8)
    for descriptor in range(4):
        connect(connections, descriptor, ALICE)
    for descriptor in range(4, 7):
        connect(connections, descriptor, BOB)
    connect(connections, 7, "uid 1002")

    closed = connections.accept(8, "uid 1003", 0.0)

    assert closed is not None
    assert closed.descriptor == 0
    for descriptor in range(9):
        connections.disconnect(descriptor)
    assert len(connections) == 0


def test_who_gives_one_is_always_somebody_with_the_most_and_a_silent_one() -> None:
    """In a random history, compared with a look at all peers."""
    draw, limit, peers = random.Random(1), 60, [f"uid {number}" for number in range(20)]
    connections, here = build_connections(limit), dict[int, tuple[str, bool]]()
    num_chosen = 0
    for descriptor in range(6000):
        peer = draw.choice(peers[: draw.randrange(1, 20)])
        here[descriptor] = peer, True
        counts = Counter(of for of, _ in here.values())
        closed = connections.accept(descriptor, peer, 0.0)
        if closed is None:
            assert len(here) <= limit and counts[peer] <= limit // SHARE_OF_PEER
        else:
            silent = {of for of, is_silent in here.values() if is_silent}
            assert here[closed.descriptor] == (closed.peer, True)
            if counts[peer] <= limit // SHARE_OF_PEER:
                assert counts[closed.peer] == max(counts[of] for of in silent)
                num_chosen += 1
            connections.disconnect(closed.descriptor)
            del here[closed.descriptor]
        for other in draw.sample(list(here), draw.randrange(2)):
            if draw.random() < 0.5:
                connections.disconnect(other)
                del here[other]
            elif here[other][1] and connections.add(connections.new_serial(), other, b"\0a", "", has_name=False):
                here[other] = here[other][0], False

    assert num_chosen > 100 and len(connections) == len(here) and len(connections._most) <= 2 * len(peers) + KEPT
