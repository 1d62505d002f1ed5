"""How many drafts decoding rows have in a step.

A step verifies the drafts of a row as it computes a prompt's chunk: its token behind each draft is
sampled, and lands while the drafts before it were right (Leviathan et al. 2023; here each token
is drawn as it would be without drafts, so that the text is the same). Reading the weights takes
the time of a step, up to some number of tokens; beyond, more tokens cost more. So drafts are
granted while they raise the tokens that a step is expected to give for each second that it takes.

A draft is right with the row's *acceptance*, if those before it were: the share of its last
drafts that were right, the older the less. A row that has not been granted any for some time comes
back to what is expected of a new one, and is tried again.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.sequence import Sequence

EXPECTED = 0.6
"""The acceptance of a row that has had no drafts."""
EXPECTED_WEIGHT = 1.0
"""What that counts, in drafts."""
REMEMBERED = 0.85
"""What a row's earlier drafts count beside those of its last step."""
REMEMBERED_UNTRIED = 0.97
"""The same where drafts were there and none was granted."""


class Speculation:
    """Grants up to ``num_speculative_tokens`` drafts a row, and counts what came of them.

    ``seconds`` is what a step of so many tokens takes, None if nobody knows.
    """

    def __init__(self, num_speculative_tokens: int, seconds: Callable[[int], float | None] = lambda _: None) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._seconds = seconds
        self.num_drafts = 0
        """Rows that had drafts."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_pos = [0] * num_speculative_tokens

    def stats(self) -> dict[str, Any]:
        """The part of EngineStats that is about drafts."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": tuple(self.num_accepted_per_pos),
        }

    def drafts(self, sequences: list[Sequence], room: int, in_flight: int) -> dict[Sequence, int]:
        """How many drafts these decoding sequences have in a step with room for so many more
        tokens; those that have none are left out. None has more than ``in_flight`` tokens there."""
        most = {sequence: count for sequence in sequences if (count := self._most(sequence, in_flight)) > 0}
        if not most or room <= 0:
            return {}
        owners, chances = list[Sequence](), list[float]()
        for sequence, count in most.items():
            owners += [sequence] * count
            chances += [_acceptance(sequence) ** (place + 1) for place in range(count)]
        order = np.argsort(-np.array(chances), kind="stable")[:room]
        granted: dict[Sequence, int] = {}
        for index in islice(order.tolist(), self._worth(len(sequences), np.array(chances)[order])):
            granted[owners[index]] = granted.get(owners[index], 0) + 1
        return granted

    def land(self, sequence: Sequence, num_samples: int, num_tokens: int, num_found: int) -> None:
        """A row of so many samples gave so many tokens; there are drafts for those behind them."""
        drafted, accepted = min(num_samples - 1, sequence.num_drafts), num_tokens - 1
        kept = REMEMBERED_UNTRIED if sequence.num_drafts else 1.0
        if drafted > 0:
            kept = REMEMBERED
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            for place in range(accepted):
                self.num_accepted_per_pos[place] += 1
        trials = accepted + (accepted < drafted)
        sequence.draft_hits = kept * sequence.draft_hits + accepted
        sequence.draft_trials = kept * sequence.draft_trials + trials
        sequence.num_drafts = num_found

    def _most(self, sequence: Sequence, in_flight: int) -> int:
        """Drafts that it may have: the device has some, and they cannot end it."""
        if not sequence.num_drafts or sequence.constraint is not None:
            return 0
        asked, left = sequence.params.num_speculative_tokens, sequence.max_computed_tokens
        most = self.num_speculative_tokens if asked is None else min(asked, self.num_speculative_tokens)
        return min(most, left - sequence.num_computed_tokens - 1, in_flight - sequence.num_in_flight - 1)

    def _worth(self, num_rows: int, chances: NDArray[np.float64]) -> int:
        """How many of drafts of these chances, the likeliest first, make the most of a step."""
        seconds = [self._seconds(num_rows + count) for count in range(len(chances) + 1)]
        if None in seconds:
            return len(chances)
        tokens = num_rows + np.concatenate([[0.0], np.cumsum(chances)])
        return int(np.argmax(tokens / np.array(seconds, float)))


def most_samples(max_num_seqs: int, num_drafts: int) -> int:
    """Tokens that a step may sample: one for each row, and of one row at least all drafts."""
    return max(max_num_seqs, 1 + num_drafts)


def _acceptance(sequence: Sequence) -> float:
    hits, trials = sequence.draft_hits + EXPECTED * EXPECTED_WEIGHT, sequence.draft_trials + EXPECTED_WEIGHT
    return hits / trials
