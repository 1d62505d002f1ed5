"""Seeing that the output has fallen into a loop."""

import numpy as np

from engine.sampling_params import RepetitionDetection


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
