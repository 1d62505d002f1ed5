"""WaitingQueue: whose turn it is."""

import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting.client_turns import REMEMBERED
from engine.scheduling.waiting.waiting_queue import MOST_PASSED_OF_CLIENT, REMEMBERED_LEVELS, WaitingQueue


def build_sequence(request_id: str, client: str = "", priority: int = 0, prompt: int = 10, user: str = "") -> Sequence:
    """One of that client."""
    params = SamplingParams(priority=priority)
    return Sequence(request_id, [1] * prompt, params, frozenset(), max_tokens=4, seed=0, client=client, user=user)


def pop(waiting: WaitingQueue) -> Sequence:
    """Take out whose turn it is."""
    head = waiting.head()
    assert head is not None
    waiting.take(head)
    return head


def serve(waiting: WaitingQueue, count: int) -> list[str]:
    """Take out so many, each charged with its prompt."""
    served = []
    for _ in range(count):
        sequence = pop(waiting)
        waiting.charge(sequence, len(sequence.prompt_token_ids))
        served.append(sequence.request_id)
    return served


def test_lower_priorities_come_first_and_equals_in_order_of_arrival() -> None:
    """Whoever asks."""
    waiting = WaitingQueue()
    for number, priority in enumerate((5, 0, 0, -1, 5)):
        waiting.add(build_sequence(str(number), priority=priority))

    assert serve(waiting, 5) == ["3", "1", "2", "0", "4"]
    assert len(waiting) == 0 and waiting.head() is None and waiting.num_tokens == 0


def test_clients_take_turns_by_tokens_and_not_by_requests() -> None:
    """One sends long prompts and the other short ones: three short ones weigh as much as a long one."""
    waiting = WaitingQueue()
    for number in range(3):
        waiting.add(build_sequence(f"long {number}", "a", prompt=30))
    for number in range(9):
        waiting.add(build_sequence(f"short {number}", "b", prompt=10))

    served = serve(waiting, 8)

    assert [name.split()[0] for name in served] == ["long", "short", "short", "short"] * 2


def test_a_flood_does_not_delay_who_comes_later() -> None:
    """The newcomer begins where the others are: it is next, and gains nothing from having been idle."""
    waiting = WaitingQueue()
    for number in range(100):
        waiting.add(build_sequence(f"flood {number}", "flood"))
    serve(waiting, 50)

    for number in range(5):
        waiting.add(build_sequence(f"new {number}", "new"))
    served = serve(waiting, 10)

    assert served[0] == "new 0"
    assert sum(name.startswith("new") for name in served) == 5


def test_the_users_of_a_client_take_turns_in_its_share() -> None:
    """One floods and another comes later; a client that has many users gets no more than one that has none."""
    waiting = WaitingQueue()
    for number in range(8):
        waiting.add(build_sequence(f"hog {number}", "gateway", user="hog"))
        waiting.add(build_sequence(f"alone {number}", "alone"))
    for number in range(2):
        waiting.add(build_sequence(f"late {number}", "gateway", user="late"))

    served = serve(waiting, 8)

    assert [name.split()[0] for name in served] == ["hog", "alone", "late", "alone"] * 2


def test_a_user_whose_sequence_comes_back_has_its_turn_again() -> None:
    """It goes before its client's others, and what leaves the queue otherwise costs nobody a turn."""
    waiting = WaitingQueue()
    for name in ("a 0", "a 1", "b 0", "b 1"):
        waiting.add(build_sequence(name, user=name[0]))
    first = pop(waiting)
    waiting.remove("a 1")
    waiting.add_preempted(first, before_all=False)

    assert serve(waiting, 3) == ["a 0", "b 0", "b 1"]


def test_weights_are_shares() -> None:
    """A client of weight 3 is given three times as much."""
    waiting = WaitingQueue({"heavy": 3.0})
    for number in range(40):
        for client in ("heavy", "light"):
            waiting.add(build_sequence(f"{client} {number}", client))

    served = serve(waiting, 40)

    assert sum(name.startswith("heavy") for name in served) == 30


def test_generated_tokens_count_too() -> None:
    """Who was given more of them waits longer."""
    waiting = WaitingQueue()
    for number in range(4):
        for client in "ab":
            waiting.add(build_sequence(f"{client}{number}", client))
    first = pop(waiting)

    waiting.charge(first, 35)

    assert first.client == "a" and serve(waiting, 4) == ["b0", "b1", "b2", "b3"]


@pytest.mark.parametrize("before_all", [True, False])
def test_the_preempted_come_before_all_or_before_their_own(before_all: bool) -> None:
    """In both cases the earlier one of two, which yielded last, is the first."""
    waiting = WaitingQueue()
    for name, client in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b")):
        waiting.add(build_sequence(name, client))
    began = [pop(waiting), pop(waiting)]
    waiting.charge(began[0], 100)

    for sequence in reversed(began):
        waiting.add_preempted(sequence, before_all=before_all)

    assert serve(waiting, 4) == (["a0", "a1", "b0", "a2"] if before_all else ["b0", "a0", "a1", "a2"])


def test_of_the_preempted_who_came_first_is_the_first() -> None:
    """Be it that another one yielded later: so whoever is preempted time and again does not hide the rest."""
    waiting = WaitingQueue()
    for arrival, client in ((2, "b"), (3, "c"), (1, "a")):
        sequence = build_sequence(str(arrival), client)
        sequence.arrival = arrival
        waiting.add_preempted(sequence, before_all=True)

    assert serve(waiting, 3) == ["1", "2", "3"]


def test_whose_turn_it_would_be_had_nobody_been_preempted() -> None:
    """The first of the client that was given least; None where only preempted ones wait."""
    waiting = WaitingQueue()
    for name, client in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        waiting.add(build_sequence(name, client))
    preempted = pop(waiting)
    waiting.charge(preempted, 10)
    waiting.add_preempted(preempted, before_all=True)

    newcomer = waiting.newcomer()
    assert newcomer is not None and newcomer.request_id == "b0"
    waiting.take(newcomer)
    waiting.remove("a1")

    assert waiting.newcomer() is None and waiting.head() is preempted


def test_removing_leaves_the_others() -> None:
    """In whatever state; an unknown id is answered with None."""
    waiting = WaitingQueue()
    for name, client in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        waiting.add(build_sequence(name, client))

    removed = waiting.remove("a0")

    assert removed is not None and waiting.remove("a0") is None
    assert serve(waiting, 2) == ["a1", "b0"]


def test_clients_that_are_gone_are_forgotten() -> None:
    """However many there were, some of the latest are remembered, and whoever waits."""
    waiting = WaitingQueue()
    waiting.add(build_sequence("stays", "patient", prompt=1))
    for number in range(9000):
        waiting.add(build_sequence(str(number), f"client {number}"))
        waiting.charge(pop(waiting), 1)

    (level,) = waiting._levels.values()
    assert len(level._counters) < 3 * REMEMBERED and len(level._heap) < 10


def test_who_comes_and_goes_leaves_nothing_behind() -> None:
    """While nobody gets a turn, requests are sent and aborted: the queue does not grow, and those who wait keep their order."""
    waiting = WaitingQueue()
    for client in ("a", "b"):
        waiting.add(build_sequence(client, client))
    for number in range(9000):
        waiting.add(build_sequence(str(number), f"client {number % 3}"))
        waiting.remove(str(number))

    (level,) = waiting._levels.values()
    assert len(level._heap) < 3 * REMEMBERED
    assert serve(waiting, 2) == ["a", "b"]


def test_so_it_is_where_each_is_another_client() -> None:
    """None of whom is ever given anything."""
    waiting = WaitingQueue()
    waiting.add(build_sequence("a", "a"))
    for number in range(9000):
        waiting.add(build_sequence(str(number), f"client {number}"))
        waiting.remove(str(number))

    (level,) = waiting._levels.values()
    assert len(level._counters) < 3 * REMEMBERED
    assert serve(waiting, 1) == ["a"]


def test_users_have_the_turns_again_of_those_that_were_passed_by() -> None:
    """Who is passed by comes back in front of its user's others, and its user in front of the client's."""
    waiting = WaitingQueue()
    for name in ("a1", "a2", "b1", "c1"):
        waiting.add(build_sequence(name, user=name[0]))

    for name in ("a1", "b1"):
        head = waiting.head()
        assert head is not None and head.request_id == name
        waiting.pass_by(head)
    waiting.come_back()

    assert serve(waiting, 4) == ["a1", "b1", "c1", "a2"]


def test_who_is_passed_by_comes_back_to_the_same_place() -> None:
    """Of all priorities and clients, equals in turns included, in the order in which it was before."""
    waiting, again = WaitingQueue(), WaitingQueue()
    for queue in (waiting, again):
        for number, (client, priority) in enumerate((("a", 0), ("b", 0), ("a", 0), ("c", -1), ("b", 5), ("c", 0))):
            queue.add(build_sequence(str(number), client, priority))
        queue.add_preempted(build_sequence("preempted", "b"), before_all=True)

    passed = []
    while (head := waiting.head()) is not None:
        waiting.pass_by(head)
        passed.append(head.request_id)
    assert waiting.num_passed_by == len(waiting) == 7
    waiting.come_back()

    assert passed[:3] == ["3", "preempted", "0"]
    assert serve(waiting, 7) == serve(again, 7)


def test_the_next_one_s_turn_costs_who_was_passed_by_nothing() -> None:
    """Its client is as far behind as it was, and whoever comes new begins where those are that were served."""
    waiting = WaitingQueue()
    for number in range(9):
        waiting.add(build_sequence(f"b{number}", "b"))
    waiting.add(build_sequence("a0", "a"))
    serve(waiting, 1)
    assert waiting.head().client == "a"
    waiting.pass_by(waiting.head())
    served = serve(waiting, 4)
    waiting.come_back()
    waiting.add(build_sequence("c0", "c"))

    assert served == ["b1", "b2", "b3", "b4"]
    assert serve(waiting, 3) == ["a0", "c0", "b5"]


def test_what_a_client_was_given_counts_when_the_queue_was_empty_meanwhile() -> None:
    """It generates on while nobody waits; then its next request comes behind another's, until all is forgotten."""
    waiting = WaitingQueue()
    waiting.add(build_sequence("a0", "a"))
    first = pop(waiting)
    waiting.charge(first, 500)

    waiting.add(build_sequence("a1", "a"))
    for number in range(3):
        waiting.add(build_sequence(f"b{number}", "b"))
    assert serve(waiting, 4) == ["b0", "b1", "b2", "a1"]
    waiting.forget()
    waiting.add(build_sequence("a2", "a"))
    waiting.add(build_sequence("b3", "b"))

    assert serve(waiting, 2) == ["a2", "b3"]


def test_priorities_that_are_gone_are_forgotten() -> None:
    """However many there were, some of the latest are remembered."""
    waiting = WaitingQueue()
    for number in range(1000):
        waiting.add(build_sequence(str(number), priority=number))
        waiting.charge(pop(waiting), 1)

    assert not waiting._levels and len(waiting._left) == REMEMBERED_LEVELS


def test_who_is_passed_by_in_every_plan_leaves_no_trace() -> None:
    """The heap of turns has a bound, and the order stays."""
    waiting = WaitingQueue()
    for number in range(5):
        waiting.add(build_sequence(str(number), client=str(number)))
    for _ in range(2 * REMEMBERED):
        while (head := waiting.head()) is not None:
            waiting.pass_by(head)
        waiting.come_back()

    (level,) = waiting._levels.values()
    assert len(level._heap) <= 2 * (5 + REMEMBERED) + 1
    assert serve(waiting, 5) == ["0", "1", "2", "3", "4"]


def test_of_one_client_no_more_are_passed_by_than_some_while_others_wait() -> None:
    """All come back where they were, those that were not looked at, too."""
    waiting = WaitingQueue()
    for number in range(100):
        waiting.add(build_sequence(f"many {number}", client="many"))
    waiting.add_preempted(build_sequence("preempted", client="many"), before_all=True)
    waiting.add(build_sequence("one", client="one"))
    passed = []
    while (head := waiting.head()) is not None:
        passed.append(head.request_id)
        waiting.pass_by(head)
    waiting.come_back()

    assert passed[0] == "preempted" and passed[-1] == "one" and len(passed) == MOST_PASSED_OF_CLIENT + 1
    waiting.check_integrity()
    order = [pop(waiting).request_id for _ in range(102)]
    assert (
        order[0] == "preempted" and order[1:101] == [f"many {number}" for number in range(100)] and order[101] == "one"
    )
