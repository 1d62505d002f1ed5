"""What ends an output by what it says: stop strings, and repetition."""

from functools import lru_cache

import numpy as np

from engine.sampling_params import RepetitionDetection


class StopStrings:
    """Passes text on, up to the stop that is complete first; of two complete at once, the longer.

    With ``include`` up to its end, or else up to its start. The cut is the same however the text is divided into pieces.
    A character costs a step or two for each stop, whatever the text and the stops are.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched = False

    def add(self, piece: str) -> str:
        """The text that can be shown; held back is the longest suffix that a stop could begin with."""
        if not self._stops:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            longest = max([stop.add(character) for stop in self._stops])
            if longest:
                self.matched = True
                self._held = ""
                return text[: end if self._include else end - longest]
        shown = len(text) - max(stop.num_begun for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What is held back, at the end of the text: no stop came of it."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """How much of one string the text ends with: the automaton of Knuth, Morris and Pratt."""

    def __init__(self, string: str) -> None:
        self._string = string
        self._shorter = _shorter(string)
        self.num_begun = 0
        """Characters at the end of the text that are the string's first, as many as there are."""

    def add(self, character: str) -> int:
        """Reads one more character of the text; the string's length if it is complete with it, or else 0."""
        begun = self.num_begun
        while begun and self._string[begun] != character:
            begun = self._shorter[begun]
        self.num_begun = begun + (self._string[begun] == character)
        return self.num_begun if self.num_begun == len(self._string) else 0


@lru_cache(maxsize=256)
def _shorter(string: str) -> list[int]:
    """For each number of the string's first characters, how many of the first they end with, short of all."""
    shorter, length = [0, 0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = shorter[length]
        length += string[length] == character
        shorter.append(length)
    return shorter


class RepetitionDetector:
    """Looks for a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens, ``min_count`` times in a row, at the end.

    It counts, for each size, for how many tokens now each has been the one that many before it: a token costs one
    comparison per size, in numpy.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        self._sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = self._sizes * (detection.min_count - 1)
        self._runs = np.zeros(len(self._sizes), np.int64)
        self._recent = np.full(detection.max_pattern_size, -1)
        """A ring of the last tokens."""
        self._count = 0

    def add(self, token_id: int) -> bool:
        """Whether a loop is complete with this token."""
        before = self._recent[(self._count - self._sizes) % len(self._recent)]
        self._runs = np.where(before == token_id, self._runs + 1, 0)
        self._recent[self._count % len(self._recent)] = token_id
        self._count += 1
        return bool((self._runs >= self._needed).any())
