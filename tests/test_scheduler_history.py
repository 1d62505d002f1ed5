"""Random histories of the scheduler under its model checker; `scripts/bench soak` runs longer ones."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.histories.scheduler_history import SchedulerHistory


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 60))
def test_any_history_finishes_every_sequence_and_loses_nothing(random, steps):
    """Requests, plans, landings and aborts at random: pages and order hold after each, and all get their own tokens."""
    history = SchedulerHistory(random)

    for _ in range(steps):
        history.step()

    history.end()
