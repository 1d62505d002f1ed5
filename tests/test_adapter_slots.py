"""Which adapter is in which slot: pins, evictions, steps in flight, and adapters that are removed while they are used."""

import pytest

from engine.sampling_params import SamplingParams
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence


def build_slots(num_slots, *uids):
    """Slots, and adapters that are in none yet."""
    slots = AdapterSlots(num_slots)
    for uid in uids:
        slots.add(uid)
    return slots


def enter(slots, uid):
    """A sequence that waits with an adapter."""
    sequence = Sequence(f"of {uid}", [1], SamplingParams(), frozenset(), 1, 0, adapter_id=uid)
    slots.enter(sequence)
    return sequence


def run(slots, uid):
    """A sequence that runs with an adapter."""
    sequence = enter(slots, uid)
    assert slots.has_room(sequence)
    slots.pin(sequence)
    return sequence


def plan(slots, *sequences):
    """A step of these sequences."""
    planned = NextIterationPlan(sequences=list(sequences))
    slots.plan(planned)
    return planned


def end(slots, sequence):
    """A running sequence has ended."""
    slots.release(sequence)
    slots.leave(sequence)


def test_a_slot_is_given_away_only_when_every_step_in_flight_that_reads_it_has_landed():
    """Its sequence has ended, but a step that reads it runs: another adapter's sequence waits for that."""
    slots = build_slots(1, 1, 2)
    first = run(slots, 1)
    steps = [plan(slots, first), plan(slots, first)]
    end(slots, first)
    second = enter(slots, 2)

    assert not slots.has_room(second)
    slots.landed(steps[0])
    assert not slots.has_room(second)
    slots.landed(steps[1])
    assert slots.has_room(second)


def test_an_adapter_is_written_before_the_first_step_that_reads_it_and_not_again():
    """The next sequence with it finds it there, and no step carries a write."""
    slots = build_slots(2, 1)
    first = run(slots, 1)

    assert plan(slots, first).adapter_loads == [(1, 0)]
    end(slots, first)
    again = run(slots, 1)
    assert plan(slots, again).adapter_loads == []
    assert slots.stats()["adapter_loads"] == 1


def test_the_slot_that_was_used_longest_ago_is_given_away_and_empty_ones_first():
    """Three adapters in two slots: the third takes the first one's."""
    slots = build_slots(2, 1, 2, 3)
    for uid in (1, 2):
        sequence = run(slots, uid)
        slots.landed(plan(slots, sequence))
        end(slots, sequence)
    assert slots.stats()["adapter_evictions"] == 0

    third, second = run(slots, 3), run(slots, 2)

    assert plan(slots, third, second).adapter_loads == [(3, 0)]
    assert (third.adapter_slot, second.adapter_slot, slots.stats()["adapter_evictions"]) == (0, 1, 1)


def test_a_pinned_slot_is_never_given_away():
    """While its sequence runs nobody else has room; the same adapter has."""
    slots = build_slots(1, 1, 2)
    run(slots, 1)

    assert not slots.has_room(enter(slots, 2))
    assert slots.has_room(enter(slots, 1))


def test_a_removed_adapter_is_forgotten_with_its_last_sequence_and_its_slot_is_empty():
    """Sequences that wait or run with it go on; no write is left of it."""
    slots = build_slots(1, 1)
    running, waiting = run(slots, 1), enter(slots, 1)
    slots.remove(1)
    assert 1 in slots

    end(slots, running)
    assert slots.take_forgotten() == []
    slots.leave(waiting)

    assert slots.take_forgotten() == [1] and 1 not in slots
    slots.add(2)
    assert plan(slots, run(slots, 2)).adapter_loads == [(2, 0)]


def test_what_a_lost_device_had_in_its_slots_is_written_again():
    """After a failed step every adapter is loaded anew before it is read."""
    slots = build_slots(1, 1)
    first = run(slots, 1)
    plan(slots, first)
    slots.release(first)

    slots.lose()

    slots.pin(first)
    assert plan(slots, first).adapter_loads == [(1, 0)]


def test_a_sequence_without_an_adapter_always_has_room():
    """Also in an engine that serves none."""
    slots = AdapterSlots()
    sequence = run(slots, 0)

    planned = plan(slots, sequence)

    assert sequence.adapter_slot == -1 and not planned.read_slots and not planned.adapter_loads


def test_running_and_waiting_sequences_are_counted_by_adapter():
    """For the metrics."""
    slots = build_slots(2, 1, 2)
    run(slots, 1)
    enter(slots, 1)
    enter(slots, 2)

    assert slots.stats()["adapters_running"] == {1: 1}
    assert slots.stats()["adapters_waiting"] == {1: 1, 2: 1}


def test_an_adapter_is_never_added_twice():
    """Reading a name again gives another uid."""
    with pytest.raises(AssertionError, match="here already"):
        build_slots(1, 1, 1)
