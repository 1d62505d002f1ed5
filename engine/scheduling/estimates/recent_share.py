"""How often something has happened of late."""

REMEMBERED = 0.85
"""What earlier trials count beside those of the last time."""


class RecentShare:
    """The share of trials that succeeded, the older the less. ``expected`` counts as one trial."""

    __slots__ = ("_successes", "_trials")

    def __init__(self, expected: float) -> None:
        self._successes, self._trials = expected, 1.0

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return self._successes / self._trials

    def learn(self, successes: int, trials: int) -> None:
        """So many trials, all at once, and how many of them succeeded."""
        self._successes = REMEMBERED * self._successes + successes
        self._trials = REMEMBERED * self._trials + trials
