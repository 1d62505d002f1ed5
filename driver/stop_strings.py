"""Finding stop strings, and what stop patterns match, in text that comes in pieces, without ever showing a part of one."""

from collections.abc import Sequence

from driver.stop_regex import StopRegex, StopRegexSearch


class StopStrings:
    """Passes text on, up to the stop that is complete first; of two complete at once, the longer.

    With ``include`` up to its end, or else up to its start. The cut is the same however the text is divided into pieces.
    """

    def __init__(self, stops: list[str], regexes: Sequence[StopRegex] = (), *, include: bool = False) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._searches = [StopRegexSearch(regex) for regex in regexes]
        self._include = include
        self._held = ""
        self._shown = 0
        """Characters passed on, of those that were searched."""
        self.matched = False

    def add(self, piece: str) -> str:
        """The text that can be shown; held back is the longest suffix that a stop could begin with."""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        for search in self._searches:
            match = search.add(piece)
            if match is not None:
                found.append((match[0] - self._shown, match[1] - self._shown))
        if found:
            self.matched = True
            self._held = ""
            end, start = min(found)
            return text[: end if self._include else start]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        self._shown += shown
        return text[:shown]

    def flush(self) -> str:
        """What is held back, at the end of the text: no stop came of it."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        end = self._shown + len(text)
        held = max((end - search.held_from for search in self._searches), default=0)
        for length in range(min(self._longest - 1, len(text)), held, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return held
