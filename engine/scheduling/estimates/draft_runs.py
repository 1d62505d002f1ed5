"""How far drafts stay right, by how far they have."""

from engine.scheduling.estimates.recent_share import RecentShare

LEAST_DEPTHS = (0, 1, 2, 4, 8, 12, 16, 24, 32)
"""From which depths on shares are counted apart: runs differ the less in their next draft the longer
they are."""
DEPTHS = LEAST_DEPTHS[-1] + 1
"""How many have a share; deeper ones have that of the last."""
_GROUPS = [sum(least <= depth for least in LEAST_DEPTHS) - 1 for depth in range(DEPTHS)]
"""By depth, which share is its own."""
REMEMBERED = 0.9
"""What earlier drafts of a depth count beside those of the last time."""


class DraftRuns:
    """Of one row: the chances of its next drafts.

    What is looked up is a copy of an earlier text, and right up to where this text leaves that one:
    a *run*. After it the copy is of another place, or there is none for some steps. So a draft's
    chance is the share of earlier ones that were right at its *depth*, which is the tokens of the run
    before it. Few are known of a depth at first: the share of all drafts counts as one of each.
    Drafts of a model are always there, and its first is the likeliest: each step is a run of its own.

    The token of a step without drafts says, too, whether the run went on: behind it there are drafts,
    or none, or those of another run. It counts where the next step had drafts, and if there were some
    only with the first of them right, as those of another run would make of a row that often begins
    runs one that stays in them.
    """

    __slots__ = ("_all", "_begins_anew", "_depth", "_right", "_shares", "_trials", "_uncounted")

    def __init__(self, expected: float) -> None:
        self._depth = 0
        """Tokens of the run so far."""
        self._all = RecentShare(expected)
        self._begins_anew = RecentShare(0.5)
        """How often there were drafts right behind a run's end."""
        self._right, self._trials = [0.0] * len(LEAST_DEPTHS), [0.0] * len(LEAST_DEPTHS)
        self._shares: list[float] = []
        """By depth, what they make; empty when they are to be made anew."""
        self._uncounted: tuple[int, bool] | None = None
        """The depth of the last token, and whether it was right, if its step had no drafts."""

    def chances(self, count: int, num_in_flight: int) -> list[float]:
        """Of each of ``count`` drafts behind so many tokens in flight: that it is there and right."""
        if not self._shares:
            self._shares = self._make()
        shares, depth = self._shares, self._depth
        goes_on = 1.0
        for token in range(depth, depth + num_in_flight):
            goes_on *= shares[min(token, DEPTHS - 1)]
        anew, depth, chances = (1 - goes_on) * self._begins_anew.value, depth + num_in_flight, []
        for place in range(count):
            goes_on *= shares[min(depth + place, DEPTHS - 1)]
            anew *= shares[min(place, DEPTHS - 1)]
            chances.append(goes_on + anew)
        return chances

    def land(self, num_granted: int, num_there: int, num_right: int, *, more: bool) -> None:
        """A step had so many drafts of those that were there, of which the first ``num_right`` were
        right; behind its tokens there are ``more``, or none."""
        judged = min(num_granted, num_there)
        if num_granted and self._uncounted is not None:
            depth, was_right = self._uncounted
            if not (was_right and judged and not num_right):
                self._count(depth, int(was_right), int(not was_right))
        self._uncounted = None
        went_on = bool(num_there) and num_right == judged and more
        if judged:
            wrong = num_right < judged
            is_known = not wrong and num_there > judged
            self._count(self._depth, num_right + (is_known and more), wrong or (is_known and not more))
        elif num_there:
            self._uncounted = self._depth, more
        if went_on:
            self._depth += num_right + 1
        else:
            self._depth = 0
            self._begins_anew.learn(more, 1)

    def land_of_model(self, num_granted: int, num_right: int) -> None:
        """A step had so many drafts of a model, of which the first ``num_right`` were right."""
        self._count(0, num_right, int(num_right < num_granted))

    def _count(self, depth: int, num_right: int, num_wrong: int) -> None:
        """Drafts from this depth on: so many that were right, and then one that was not, or none."""
        self._all.learn(num_right, num_right + num_wrong)
        self._shares = []
        groups = [_GROUPS[min(depth + place, DEPTHS - 1)] for place in range(num_right + num_wrong)]
        for group in set(groups):
            count = groups.count(group)
            right = count - 1 if num_wrong and group == groups[-1] else count
            self._right[group] = REMEMBERED * self._right[group] + right
            self._trials[group] = REMEMBERED * self._trials[group] + count

    def _make(self) -> list[float]:
        """The share of each depth."""
        all_drafts = self._all.value
        shares = [(right + all_drafts) / (trials + 1) for right, trials in zip(self._right, self._trials, strict=True)]
        return [shares[group] for group in _GROUPS]
