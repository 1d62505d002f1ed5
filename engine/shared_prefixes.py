"""Which pages a sequence need not compute, as another has, and which of its own others may have."""

from caching.page_manager import HBMPageManager
from engine.sequence import Sequence


class SharedPrefixes:
    """Knows the pages that are kept, and those that begun prompts have yet to fill.

    A page is kept from the plan on that fills it: steps run in order, and a step writes before it reads. The last known
    token of a sequence is never shared: a step samples from it.
    """

    def __init__(self, pages: HBMPageManager, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._computing: dict[bytes, Sequence] = {}
        self.tokens_looked_up = 0
        """Tokens of begun sequences that pages could have held."""
        self.tokens_found = 0
        """Those of them that pages held."""

    def find(self, sequence: Sequence) -> list[int] | None:
        """Pages that hold its beginning; None where another is about to fill the next one.

        There are none where log-probabilities of the prompt are still to be told: pages do not hold them.
        """
        params, prompt = sequence.params, sequence.prompt_token_ids
        if params.prompt_logprobs is not None and sequence.num_prompt_logprobs < len(prompt):
            return []
        keys = self._keys(sequence)
        found = self._pages.find(keys)
        if len(found) < len(keys) and keys[len(found)] in self._computing:
            return None
        return found

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """It got a slot, and will compute its pages from this one on."""
        keys = self._keys(sequence)
        self.tokens_looked_up += len(keys) * self._page_size
        self.tokens_found += num_found * self._page_size
        for key in keys[num_found:]:
            self._computing.setdefault(key, sequence)

    def keep(self, sequence: Sequence, start: int, end: int) -> None:
        """Its tokens from start to end are known, and computed by what has been planned: keep the pages they fill."""
        first, last = start // self._page_size, end // self._page_size
        if first == last:
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

    def check_integrity(self, running: set[str]) -> None:
        """Assert that whoever is waited for runs."""
        awaited = {sequence.request_id for sequence in self._computing.values()}
        assert awaited <= running, f"pages are awaited from {awaited - running}, which do not run"

    def _keys(self, sequence: Sequence) -> list[bytes]:
        return sequence.page_keys_to((sequence.num_tokens - 1) // self._page_size, self._page_size)

    def _computed(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]
