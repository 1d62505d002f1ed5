"""How many drafts decoding rows have in a step.

A step verifies the drafts of a row as it computes a prompt's chunk: its token behind each draft is
sampled, and lands while the drafts before it were right (Leviathan et al. 2023; here each token
is drawn as it would be without drafts, so that the text is the same). Reading the weights takes
the time of a step, up to some number of tokens; beyond, more tokens cost more. A draft model takes
its time, too, once for each place behind a row's token that some row drafts. So drafts are
granted while they raise the tokens that a step is expected to give for each second that it takes.

The drafts of a row with a constraint are tokens that this forces, and behind them guesses of it;
those of others are found on the device, and with a step in flight some are granted that may not be
there. A draft's chance is that of the row's last ones, the older the less: of forced ones that of
all, of others that of those at as many tokens behind the beginning of what they copy
(``estimates/draft_runs.py``). That of guesses is counted by the constraint, which sees whether they
were right though nobody verified them. A row whose drafts are not worth it rests (``draft_rest``),
and a step in which all rows rest, or for whose drafts there is no room, is planned as without
speculation.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Container
from collections.abc import Sequence as ListOf
from itertools import accumulate
from typing import Any

from engine.scheduling.rows.draft_rest import LONGEST_REST, REST_SECONDS
from engine.scheduling.sequence import Sequence

LEAST_TRIED = 32
"""Plans that a row rests at most, if it has drafts, however long a step takes: to try one takes a
longer step."""


class Speculation:
    """Grants up to ``num_speculative_tokens`` drafts a row, and counts what came of them.

    ``seconds`` is what a step takes of so many tokens, and so many passes of a draft model; None if
    nobody knows. ``sizes``, ascending, are what its tokens are padded to; by default each number is
    one. ``has_model`` is whether there is such a model, and ``draft_context`` how many tokens of a sequence it was made
    for; None for all.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        seconds: Callable[[int, int], float | None] = lambda _tokens, _passes: None,
        sizes: ListOf[int] = (),
        *,
        has_model: bool = False,
        draft_context: int | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.has_model = has_model
        """Whether a draft model writes drafts."""
        self._seconds, self._sizes, self._draft_context = seconds, sizes, draft_context
        self._number = 0
        """Of the last plan."""
        self.looks_up = has_model
        """Whether drafts are to be looked for behind the tokens of the rows of the last plan."""
        self.num_drafts = 0
        """Rows that had drafts."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos = [0] * num_speculative_tokens
        self.num_earlier_draft_tokens = 0
        """Of earlier texts, as far as the device has found them there."""
        self.num_earlier_accepted_tokens = 0

    def stats(self) -> dict[str, Any]:
        """The part of EngineStats that is about drafts."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": tuple(self.num_accepted_per_pos),
            "num_earlier_draft_tokens": self.num_earlier_draft_tokens,
            "num_earlier_accepted_tokens": self.num_earlier_accepted_tokens,
        }

    def passes(self, num_drafts: int) -> int:
        """Passes of a draft model in a step whose rows have up to so many drafts of it."""
        return num_drafts if self.has_model else 0

    def drafts(self, sequences: list[Sequence], room: int, in_flight: int) -> dict[Sequence, int]:
        """How many drafts these decoding sequences have in a step with room for so many more
        tokens; those that have none are left out. None has more than ``in_flight`` tokens there."""
        self._number += 1
        number = self._number
        awake = [] if room <= 0 else [s for s in sequences if s.draft_rest.until <= number or s.constraint is not None]
        self.looks_up = self.has_model or any(sequence.constraint is None for sequence in awake)
        if not awake:
            return {}
        most = {sequence: count for sequence in awake if (count := self._most(sequence, in_flight)) > 0}
        granted = self._grant(sequences, most, room) if most else {}
        self._rest(awake, most, granted, room - sum(granted.values()), self._seconds(len(sequences), 0))
        return granted

    def _grant(self, sequences: list[Sequence], most: dict[Sequence, int], room: int) -> dict[Sequence, int]:
        """Of the ``most`` drafts that rows may have, as many as make the most of the step."""
        owners, chances, places = list[Sequence](), list[float](), list[int]()
        for sequence, count in most.items():
            owners += [sequence] * count
            places += [0] * count if sequence.expected_drafts else range(1, count + 1)
            chances += self._chances(sequence, count)
        order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:room]
        worth = self._worth(len(sequences), [chances[index] for index in order], [places[index] for index in order])
        granted: dict[Sequence, int] = {}
        for index in order[:worth]:
            granted[owners[index]] = granted.get(owners[index], 0) + 1
        return granted

    def land(
        self, sequence: Sequence, num_samples: int, num_tokens: int, num_found: int, num_forced: int | None = None
    ) -> None:
        """A row of so many samples gave so many tokens; the device has found drafts for those behind
        them, so many. ``num_forced`` of its drafts were forced by a constraint, and the others its
        guesses; None if they were the device's."""
        drafted = granted = num_samples - 1
        accepted = num_tokens - 1
        if sequence.constraint is None:
            if not self.has_model:
                sequence.draft_runs.land(granted, sequence.num_drafts, accepted, more=bool(num_found))
            drafted, sequence.num_drafts = min(granted, sequence.num_drafts), num_found
        if not granted:
            return
        if num_forced:
            right = min(accepted, num_forced)
            sequence.forced_acceptance.learn(right, right + (right < num_forced))
        elif num_forced is None and self.has_model:
            sequence.draft_runs.land_of_model(drafted, accepted)
        if drafted:
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            if sequence.has_earlier_drafts and sequence.constraint is None:
                self.num_earlier_draft_tokens += drafted
                self.num_earlier_accepted_tokens += accepted
            for place in range(accepted):
                self.num_accepted_per_pos[place] += 1
        if granted == accepted == 1:
            sequence.draft_rest.tried_right()

    def _rest(
        self,
        awake: list[Sequence],
        most: Container[Sequence],
        granted: dict[Sequence, int],
        room: int,
        seconds: float | None,
    ) -> None:
        """Let rows rest whose drafts are not worth it, or of those that have rested try one each,
        where there is room; a step takes so many seconds without drafts.

        A row with a constraint does not rest, as its drafts cost nothing to find, and where some are
        forced they are right. It is tried as if it had rested.
        """
        longest = 1 if seconds is None else max(1, int(REST_SECONDS / max(seconds, REST_SECONDS / LONGEST_REST)))
        for sequence in awake:
            rest = sequence.draft_rest
            if sequence in granted:
                rest.granted()
            elif rest.until > self._number:
                continue
            elif sequence in most:
                if rest.to_try and room > 0:
                    granted[sequence], rest.to_try, room = 1, False, room - 1
                rest.declined(self._number, max(LEAST_TRIED, longest))
            elif sequence.constraint is None:
                rest.declined(self._number, longest)

    def _most(self, sequence: Sequence, in_flight: int) -> int:
        """Drafts that it may have: the device or its constraint has some, and they cannot end it. For each draft its
        model is fed the token before it."""
        asked, left = sequence.params.num_speculative_tokens, sequence.max_computed_tokens
        most = self.num_speculative_tokens if asked is None else min(asked, self.num_speculative_tokens)
        if sequence.expected_drafts:
            most = min(most, len(sequence.expected_drafts))
        elif not (sequence.num_drafts if sequence.constraint is None else self.has_model and sequence.num_in_flight):
            return 0
        elif self._draft_context is not None:
            most = min(most, self._draft_context - sequence.num_computed_tokens)
        return min(most, left - sequence.num_computed_tokens - 1, in_flight - sequence.num_in_flight - 1)

    def _worth(self, num_rows: int, chances: ListOf[float], places: ListOf[int]) -> int:
        """How many of drafts of these chances, the likeliest first, make the most of a step.

        ``places`` are counted from 1, the first draft of a row; 0 is one that a constraint forces.
        """
        tokens = list(accumulate(chances, initial=float(num_rows)))
        passes = list(accumulate(map(self.passes, places), max, initial=0))
        best, least = 0, math.inf
        for count in self._counts(num_rows, len(chances)):
            seconds = self._seconds(num_rows + count, passes[count])
            if not seconds:  # nobody knows, or the clock has seen none pass
                return len(chances)
            if seconds < least * tokens[count]:
                best, least = count, seconds / tokens[count]
        return best

    def _chances(self, sequence: Sequence, count: int) -> list[float]:
        """Of each of so many drafts, that there is one and it is right."""
        if sequence.constraint is None or not sequence.expected_drafts:
            return sequence.draft_runs.chances(count, 0 if self.has_model else sequence.num_in_flight)
        forced, guess = min(count, sequence.num_forced_drafts), sequence.constraint.guess_acceptance
        acceptance = sequence.forced_acceptance.value
        chances = [acceptance ** (place + 1) for place in range(forced)]
        return chances + [acceptance**forced * guess ** (place + 1) for place in range(count - forced)]

    def _counts(self, num_rows: int, most: int) -> list[int]:
        """How many drafts, up to ``most``, may be the best number: without a draft model those that
        fill a size, as fewer cost the same."""
        if self.has_model or not self._sizes:
            return list(range(most + 1))
        filling = self._sizes[bisect_left(self._sizes, num_rows) : bisect_left(self._sizes, num_rows + most)]
        return [size - num_rows for size in filling] + [most]


def most_samples(max_num_seqs: int, num_drafts: int) -> int:
    """Tokens that a step may sample: one for each row, and of one row at least all drafts."""
    return max(max_num_seqs, 1 + num_drafts)
