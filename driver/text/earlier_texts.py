"""Texts of requests that have ended, for n-gram drafts of later requests of the same tenant."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.speculation.history import NO_DRAFT

MOST_SALTS = 256
"""Salts whose texts are kept, those last that had a request end last."""
TEXTS = 4
"""A text is cut to its last tokens, so that there is room for so many."""


class EarlierTexts:
    """Of each salt the last ``num_tokens`` tokens of prompts and their outputs; any thread may use it.

    A salt is that of the prefix cache (``Sequence.salt``): of a tenant, its cache salt and its
    adapter. Nothing is kept of sequences without one, or found for them.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._texts: OrderedDict[bytes, array[int]] = OrderedDict()
        """None of the arrays is written to again."""
        self._lock = threading.Lock()

    def add(self, salt: bytes | None, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep a text that has an output."""
        if salt is None or not output or not self._num_tokens:
            return
        room = max(1, self._num_tokens // TEXTS - 1)
        text = array("i", [*prompt[-room:], *output][-room:])
        text.append(NO_DRAFT)
        with self._lock:
            kept = self._texts.get(salt, array("i")) + text
            self._texts[salt] = kept[-self._num_tokens :]
            self._texts.move_to_end(salt)
            if len(self._texts) > MOST_SALTS:
                self._texts.popitem(last=False)

    def of(self, salt: bytes | None) -> Sequence[int]:
        """Texts with NO_DRAFT behind each, the latest last; the first may be cut."""
        if salt is None:
            return ()
        with self._lock:
            return self._texts.get(salt, ())
