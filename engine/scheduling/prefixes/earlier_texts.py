"""Texts of sequences that have ended, for n-gram drafts of later ones.

They are a part of the prefix cache: who shares pages shares them, and what forgets all pages
forgets them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as ListOf

from engine.scheduling.sequence import NO_DRAFT, Sequence

MOST_SALTS = 256
"""Salts whose texts are kept, those last that had a sequence end last."""
TEXTS = 4
"""A text is cut to its last tokens, so that there is room for so many."""


class EarlierTexts:
    """Of each salt the last ``num_tokens`` tokens of prompts and their outputs.

    Nothing is kept of sequences without a salt, or found for them. One thread writes; any may call
    ``of``.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens
        self._texts: OrderedDict[tuple[int, bytes], array[int]] = OrderedDict()
        """By adapter and salt. None of the arrays is written to again."""
        self._num_forgotten = 0
        """Times that all were forgotten."""
        self.num_kept = 0
        """Tokens of all salts, with NO_DRAFT behind each text."""

    @property
    def num_salts(self) -> int:
        """Salts that have texts."""
        return len(self._texts)

    def of(self, sequence: Sequence) -> ListOf[int]:
        """Texts of a sequence's salt with NO_DRAFT behind each, the latest last; the first may be
        cut."""
        if sequence.salt is None or sequence.params.num_speculative_tokens == 0:
            return ()
        return self._texts.get((sequence.adapter_id, sequence.salt), ())

    def begin(self, sequence: Sequence) -> None:
        """A sequence is given a slot, and what drafts of it are looked for in."""
        sequence.earlier = self.of(sequence)
        if sequence.began_after is None:
            sequence.began_after = self._num_forgotten

    def end(self, sequence: Sequence) -> None:
        """Keep the text of a sequence that has ended, unless it has no output, or has begun before
        all was forgotten."""
        if not self._num_tokens or sequence.salt is None or sequence.began_after != self._num_forgotten:
            return
        room = max(1, self._num_tokens // TEXTS - 1)
        output = sequence.output_token_ids[-room:]
        if not output:
            return
        prompt = sequence.prompt_token_ids[-(room - len(output)) :] if room > len(output) else []
        text, key = array("i", [*prompt, *output, NO_DRAFT]), (sequence.adapter_id, sequence.salt)
        before = self._texts.get(key, array("i"))
        self._keep(key, before[max(0, len(before) + len(text) - self._num_tokens) :] + text)
        if len(self._texts) > MOST_SALTS:
            self._forget(next(iter(self._texts)))

    def forget_all(self) -> None:
        """Nobody is given any text that has been said so far; running sequences keep theirs."""
        self._texts.clear()
        self.num_kept = 0
        self._num_forgotten += 1

    def forget_adapter(self, uid: int) -> None:
        """Drop the texts of an adapter, which no sequence will have any more."""
        for key in [key for key in self._texts if key[0] == uid]:
            self._forget(key)

    def check_integrity(self) -> None:
        """Assert that what is kept is counted right, and bounded."""
        sizes = [len(text) for text in self._texts.values()]
        assert self.num_kept == sum(sizes), f"{sum(sizes)} tokens of texts are kept, and {self.num_kept} counted"
        assert len(sizes) <= MOST_SALTS and max(sizes, default=0) <= self._num_tokens, "too much is kept"

    def _keep(self, key: tuple[int, bytes], text: "array[int]") -> None:
        self.num_kept += len(text) - len(self._texts.get(key, ()))
        self._texts[key] = text
        self._texts.move_to_end(key)

    def _forget(self, key: tuple[int, bytes]) -> None:
        self.num_kept -= len(self._texts.pop(key))
