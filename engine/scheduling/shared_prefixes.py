"""Which pages a sequence need not compute, as another has, and which of its own others may have."""

from collections.abc import Iterable

from caching.page_manager import NOTHING_FOUND, Found, HBMPageManager
from engine.scheduling.sequence import Sequence


class SharedPrefixes:
    """Knows the pages that are kept, and those that begun prompts have yet to fill.

    A page is kept from the plan on that fills it: steps run in order, and a step writes before it reads. The last known
    token of a sequence is never shared: a step samples from it. A sequence without a salt shares nothing, and is not hashed.
    """

    def __init__(self, pages: HBMPageManager, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._computing: dict[bytes, Sequence] = {}
        self.tokens_looked_up = 0
        """Tokens of begun sequences that pages could have held."""
        self.tokens_found = 0
        """Those of them that pages held."""

    def look(self, sequence: Sequence) -> Found | None:
        """About what ``find`` would find, for as little as has changed since the last look: most of those who wait go on waiting."""
        if not self._may_share(sequence):
            return NOTHING_FOUND
        keys, count = self._keys(sequence)
        if count and keys[count - 1] in self._computing:  # and so is all before it that is not held
            return None
        found = sequence.found = self._pages.recount(keys, count, sequence.found)
        if found.held < count and keys[found.held] in self._computing:
            return None
        return found

    def find(self, sequence: Sequence) -> list[int] | None:
        """Pages that hold its beginning; None where another is about to fill the next one."""
        if not self._may_share(sequence):
            return []
        keys, count = self._keys(sequence)
        pages = self._pages.find(keys[:count])
        sequence.found = Found(len(pages), len(pages) - self._pages.num_unowned(pages))
        if len(pages) < count and keys[len(pages)] in self._computing:
            return None
        return pages

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """It got a slot, and will compute its pages from this one on."""
        if sequence.salt is None:
            return
        keys, count = self._keys(sequence)
        self.tokens_looked_up += count * self._page_size
        self.tokens_found += num_found * self._page_size
        for key in keys[num_found:count]:
            self._computing.setdefault(key, sequence)

    def keep(self, sequence: Sequence, start: int, end: int) -> None:
        """Its tokens from start to end are known, and computed by what has been planned: keep the pages they fill."""
        first, last = start // self._page_size, end // self._page_size
        if first == last or sequence.salt is None:
            return
        keys = sequence.page_keys_to(last, self._page_size)
        for page in range(first, last):
            self._pages.keep(sequence.pages[page], keys[page])
            self._computed(keys[page], sequence)

    def end(self, sequence: Sequence) -> None:
        """It gives up its pages: those that it decoded into are kept as well, and nobody waits for it any more."""
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        if known > sequence.num_prefill_tokens:
            self.keep(sequence, sequence.num_prefill_tokens, known)
        for key in sequence.page_keys:
            self._computed(key, sequence)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """What their pages hold is not to be found any more, not even where they have given them up."""
        for sequence in sequences:
            self._pages.forget_keys(sequence.page_keys)

    def check_integrity(self, running: set[str]) -> None:
        """Assert that whoever is waited for runs."""
        awaited = {sequence.request_id for sequence in self._computing.values()}
        assert awaited <= running, f"pages are awaited from {awaited - running}, which do not run"

    def _may_share(self, sequence: Sequence) -> bool:
        """Not where log-probabilities of the prompt are still to be told: pages do not hold them."""
        params, prompt = sequence.params, sequence.prompt_token_ids
        told = params.prompt_logprobs is None or sequence.num_prompt_logprobs >= len(prompt)
        return sequence.salt is not None and told

    def _keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Keys of its pages, and how many of them may be shared."""
        count = (sequence.num_tokens - 1) // self._page_size
        return sequence.page_keys_to(count, self._page_size), count

    def _computed(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]
