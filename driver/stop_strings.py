"""Finding stop strings in text that comes in pieces, without ever showing a part of one."""


class StopStrings:
    """Passes text on, up to the stop string that is complete first; of two complete at once, the longer.

    With ``include`` up to its end, or else up to its start. The cut is the same however the text is divided into pieces.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._include = include
        self._held = ""
        self.matched = False

    def add(self, piece: str) -> str:
        """The text that can be shown; held back is the longest suffix that a stop string could begin with."""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            end, start = min(found)
            return text[: end if self._include else start]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What is held back, at the end of the text: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return 0
