"""When a row's drafts are thought of: while they are worth it in each plan, and else now and then.

To look for drafts and to decide how many are worth it takes some tens of microseconds a step. Where
a step takes 0.3 ms, that is a fifth of it. So a row that is granted none for some plans *rests*: it
is planned as without speculation. Rests become longer, up to ``REST_SECONDS`` of steps, so that what
they cost vanishes; and where a step takes long, they hardly skip any. They end at multiples of their
lengths, so that rows that rest are looked at in the same step. A row that has rested and whose drafts
are not worth it is tried with a single one, and again while that is right. That costs more than to
look: where there were drafts in any of the plans before a rest, it is as long as they are worth.
"""

REST_SECONDS = 0.06
"""The longest rest in time. To end one takes about 0.3 ms, for some rows."""
PATIENCE = 16
"""Plans in which a row may be granted none before it rests."""
PATIENCE_RESTED = 5
"""The same after a rest: a step that looks for drafts has landed by then, whatever the run-ahead."""
FIRST_REST = 16
"""Plans; each next rest is twice as long."""
LONGEST_REST = 256


class DraftRest:
    """Of one row."""

    __slots__ = ("_length", "_longest", "_patience", "to_try", "until")

    def __init__(self) -> None:
        self.until = 0
        """The number of the plan in which it is thought of again."""
        self.to_try = False
        """Whether a single draft of it is to be tried, though it is not worth it."""
        self._patience, self._length = PATIENCE, FIRST_REST
        self._longest = 1
        """What the next rest may take, by the plans since the last."""

    def granted(self) -> None:
        """Its drafts are worth it."""
        self._patience, self._length, self._longest, self.to_try = PATIENCE, FIRST_REST, 1, False

    def tried_right(self) -> None:
        """The single draft that was tried was right: try another in the next plan."""
        self._patience, self.to_try = PATIENCE, True

    def declined(self, number: int, longest: int) -> None:
        """It is granted none in the plan of this number; it rests at most about so many plans, or as
        many as a plan before this said since it was granted some or rested."""
        self._patience -= 1
        self._longest = max(self._longest, longest)
        if self._patience > 0:
            return
        length = min(self._length, 1 << self._longest.bit_length() - 1)
        self.until = ((number + length // 2) // length + 1) * length
        self._patience, self._length, self._longest = PATIENCE_RESTED, min(2 * length, LONGEST_REST), 1
        self.to_try = True
