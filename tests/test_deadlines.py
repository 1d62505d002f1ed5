"""Deadlines: which sequences are overdue, and when."""

import math
import random

from driver.execution.deadlines import KEPT, Deadlines
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence


def build_sequence(name: str) -> Sequence:
    """One that has not begun."""
    return Sequence(name, [1], SamplingParams(), frozenset(), 8, seed=0)


def test_a_sequence_ends_at_its_timeout_or_where_it_has_not_begun_by_then() -> None:
    """Each once; one that has begun in time goes on to its timeout, and one that is gone is not named."""
    deadlines, sequences = Deadlines(), {name: build_sequence(name) for name in "abcd"}
    deadlines.add(sequences["a"], 0.0, 5.0, None)
    deadlines.add(sequences["b"], 0.0, None, 2.0)
    deadlines.add(sequences["c"], 0.0, 4.0, 2.0)
    deadlines.add(sequences["d"], 0.0, 1.0, 1.0)
    sequences["c"].num_prefill_tokens = 1
    deadlines.discard("d")
    deadlines.discard("unknown")

    ended = [deadlines.overdue(now) for now in (0.5, 1.0, 2.0, 3.0, 4.5, 5.0)]

    assert ended == [[], [], ["b"], [], ["c"], ["a"]]
    assert deadlines.next == math.inf


def test_they_are_those_of_a_search_through_all() -> None:
    """In a random history, in which most sequences end by themselves; what is kept of these has a bound."""
    draw, deadlines, now = random.Random(1), Deadlines(), 0.0
    times: dict[str, float] = {}
    for number in range(4000):
        now += draw.random()
        if draw.random() < 0.7:
            name, timeout = str(number), draw.uniform(0, 2000)
            deadlines.add(build_sequence(name), now, timeout, None)
            times[name] = now + timeout
        for name in draw.sample(sorted(times), min(len(times), draw.randrange(3))):
            del times[name]
            deadlines.discard(name)
        late = sorted(name for name, at in times.items() if at <= now)
        for name in late:
            del times[name]

        assert deadlines.next <= min(times.values(), default=math.inf)
        assert deadlines.overdue(now) == late
        assert len(deadlines._times) <= 2 * len(times) + KEPT + 1
