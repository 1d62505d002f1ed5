"""Stop strings and repetition, which end an output by its content."""

from functools import lru_cache

import numpy as np

from engine.sampling_params import RepetitionDetection


class StopStrings:
    """Passes text on up to the stop string that is complete first, the longer of two.

    The text ends at the start of the stop string, or with ``include`` at its end, however it is
    divided into pieces, and no part of a stop string is ever shown. A character costs a step or
    two for each stop string.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that has come."""

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """The text that can be shown; the longest suffix that could begin a stop is held back. A stop string that is
        complete in a piece that may not end the text is passed over."""
        if not self._stops:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [stop.string for stop in self._stops if stop.add(character)]
            if complete and may_end:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self.matched)]
        shown = len(text) - max(stop.num_kept for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text that is held back, at the end: no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """How many first characters of a string the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self._shorter = _shorter(string)
        self.num_begun = 0
        """How many characters at the end of the text begin the string, at most."""

    @property
    def num_kept(self) -> int:
        """Characters at the end of the text that the string may yet be complete with."""
        return self._shorter[self.num_begun] if self.num_begun == len(self.string) else self.num_begun

    def add(self, character: str) -> bool:
        """Reads one more character; returns whether that completes the string."""
        begun = self.num_begun
        if begun == len(self.string):  # it was passed over
            begun = self._shorter[begun]
        while begun and self.string[begun] != character:
            begun = self._shorter[begun]
        self.num_begun = begun + (self.string[begun] == character)
        return self.num_begun == len(self.string)


@lru_cache(maxsize=256)
def _shorter(string: str) -> list[int]:
    """For each prefix, the length of its longest proper border (Knuth, Morris, Pratt)."""
    shorter, length = [0, 0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = shorter[length]
        length += string[length] == character
        shorter.append(length)
    return shorter


class RepetitionDetector:
    """Looks at the end for a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens,
    ``min_count`` times in a row.

    It counts for each size how many tokens in a row have equalled the one that many tokens before.
    A token costs one comparison for each size, in numpy.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        self._sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = self._sizes * (detection.min_count - 1)
        self._runs = np.zeros(len(self._sizes), np.int64)
        self._recent = np.full(detection.max_pattern_size, -1)
        """The last tokens, as a ring buffer."""
        self._count = 0

    def add(self, token_id: int) -> bool:
        """Whether this token completes the repetition."""
        before = self._recent[(self._count - self._sizes) % len(self._recent)]
        self._runs = np.where(before == token_id, self._runs + 1, 0)
        self._recent[self._count % len(self._recent)] = token_id
        self._count += 1
        return bool((self._runs >= self._needed).any())
