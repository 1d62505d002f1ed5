"""Guesses of what a sequence with a grammar says next: what followed its last tokens when they came
before, in its prompt or its output.

Other sequences have such drafts from the device (engine/speculation/prompt_lookup.py). Here the
grammar has to say what may follow each of them, so the host has to know them, and looks them up in
an index, which grows with the text.
"""

from collections.abc import Sequence
from itertools import takewhile

from engine.scheduling.estimates.recent_share import RecentShare

MOST_CANDIDATES = 8
"""Places that are looked at for the longest run, the latest ones."""
EXPECTED_GUESS_ACCEPTANCE = 0.5
"""Of guesses, before the first."""
LEAST_ACCEPTANCE = 0.2
"""The grammar is not asked about guesses that are right less often: what may follow them takes it
time, while the sequence waits. Whether they would have been right is seen all the same."""


class NgramIndex:
    """Where runs of tokens are in a text. One thread writes it.

    Several texts may be one, with a negative token behind each: nothing follows there.
    Runs of ``longest`` tokens at most are compared, of which the last ``shortest`` have to be the
    same.
    """

    def __init__(self, shortest: int, longest: int, token_ids: Sequence[int] = ()) -> None:
        self.shortest, self.longest = shortest, longest
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """By ``shortest`` tokens, the place behind the last run of them that something follows."""
        self._earlier: list[int] = []
        """By place, that behind the run before of the same tokens; 0 where there is none."""
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read more of the text."""
        tokens, size = self._tokens, self.shortest
        for place, token_id in enumerate(token_ids, start=len(tokens)):
            earlier = 0
            if place >= size and token_id >= 0:
                run = tuple(tokens[place - size :])
                earlier, self._latest[run] = self._latest.get(run, 0), place
            self._earlier.append(earlier)
            tokens.append(token_id)

    def last(self, count: int) -> list[int]:
        """Up to ``count`` tokens at the end."""
        return self._tokens[max(0, len(self) - count) :]

    def find(self, run: list[int]) -> tuple[int, int]:
        """How many of the last tokens of a run are in the text, and the place behind them there: of
        several the longest, of these the latest; zeros if they are not there, or nothing follows."""
        best = 0, 0
        place = self._latest.get(tuple(run[-self.shortest :]), 0)
        for _ in range(MOST_CANDIDATES):
            if not place or best[0] == self.longest:
                break
            best = max(best, (self._length(run, place), place), key=lambda found: found[0])
            place = self._earlier[place]
        return best

    def following(self, place: int, count: int) -> list[int]:
        """Up to ``count`` tokens from a place on, as far as the text there goes."""
        return list(takewhile(lambda token_id: token_id >= 0, self._tokens[place : place + count]))

    def _length(self, run: list[int], place: int) -> int:
        before = reversed(self._tokens[max(0, place - self.longest) : place])
        pairs = zip(before, reversed(run), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Guesses:
    """What one sequence is expected to say. One thread uses it; ``prompt``, which it shares with
    others, is not written any more."""

    def __init__(self, prompt: NgramIndex, token_ids: Sequence[int]) -> None:
        self._prompt = prompt
        self._output = NgramIndex(prompt.shortest, prompt.longest, prompt.last(prompt.longest))
        self._output.extend(token_ids)
        self._acceptance = RecentShare(EXPECTED_GUESS_ACCEPTANCE)
        self._expected: list[int] = []
        self._num_forced = 0
        self._asked = False

    @property
    def acceptance(self) -> float:
        """How often a guess was right of late, behind others that were."""
        return self._acceptance.value

    def read(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The next tokens of the sequence. Returns what to ask the grammar about: ``count`` tokens
        that are expected behind them, or none."""
        left = self._left(token_ids)
        self._num_forced = max(0, self._num_forced - len(token_ids)) if left else 0
        self._output.extend(token_ids)
        self._expected = left + self._look_up(left, count - len(left))
        self._asked = self.acceptance >= LEAST_ACCEPTANCE
        return self._expected if self._asked else []

    def answered(self, expected: list[int], num_forced: int) -> None:
        """What the grammar expects now: of what it was asked about, as much as it allows."""
        self._num_forced = num_forced
        if self._asked or self._expected[: len(expected)] != expected:
            self._expected = expected

    def _left(self, token_ids: Sequence[int]) -> list[int]:
        """What was expected behind these tokens, and still is; learns from those that were guesses."""
        pairs = zip(self._expected, token_ids, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        known = min(len(self._expected), len(token_ids))
        right = num_right - self._num_forced
        if right >= 0 and known > self._num_forced:
            self._acceptance.learn(right, right + (num_right < known))
        return self._expected[num_right:] if num_right == len(token_ids) else []

    def _look_up(self, left: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the last ones and those that are ``left``; none if
        these did not come before. Of places that are as good, one in the output goes before."""
        if count <= 0:
            return []
        run = (self._output.last(self._prompt.longest) + left)[-self._prompt.longest :]
        if len(run) < self._prompt.shortest:
            return []
        length, place = self._output.find(run)
        of_prompt, in_prompt = self._prompt.find(run)
        if of_prompt > length:
            return self._prompt.following(in_prompt, count)
        if not length:
            return []
        guess = (self._output.following(place, count) + left)[:count]
        for index in range(count - len(guess)):  # a loop goes on as a loop
            guess.append(guess[index])
        return guess
