"""The pages of sequences: prefix hits, pages for tokens to come, and what is cached."""

from collections.abc import Iterable

from caching.metadata import pages_for
from caching.page_manager import NOTHING_FOUND, Found, HBMPageManager
from engine.scheduling.sequence import Sequence


class SequenceMemory:
    """Gives pages to sequences and takes them back.

    A page enters the prefix cache in the plan that fills it: steps run in order, and a step writes
    before it reads. The last known token of a sequence is never a prefix hit, as a step samples
    from it. A sequence without a salt shares no pages, and its tokens are not hashed.
    """

    def __init__(self, pages: HBMPageManager, page_size: int) -> None:
        self.page_size = page_size
        """Tokens in a page."""
        self._pages = pages
        self._computing: dict[bytes, Sequence] = {}
        """By key, the pages that admitted sequences have yet to fill."""
        self.tokens_looked_up = 0
        """Tokens of admitted sequences that the prefix cache could have held."""
        self.tokens_found = 0
        """Those of them that were prefix hits."""

    def look(self, sequence: Sequence) -> Found | None:
        """About what the prefix cache has of a waiting sequence; None while another computes more.

        It costs what has changed since the last look, as most sequences that wait go on waiting.
        """
        if not self._may_share(sequence):
            return NOTHING_FOUND
        keys, count = self._keys(sequence)
        if count and keys[count - 1] in self._computing:  # and so is all before it that is not held
            return None
        found = sequence.found = self._pages.recount(keys, count, sequence.found)
        if found.held < count and keys[found.held] in self._computing:
            return None
        return found

    def needed(self, sequence: Sequence, found: Found) -> int:
        """Free or cached pages that admission takes: all but prefix hits that have an owner."""
        return pages_for(sequence.num_tokens, self.page_size) - found.owned

    def fits(self, sequence: Sequence, found: Found, spare: int) -> bool:
        """Whether the sequence can be admitted with ``spare`` pages left free or cached."""
        return self._pages.can_alloc(self.needed(sequence, found) + spare)

    def begin(self, sequence: Sequence, found: Found, spare: int) -> bool:
        """Give it pages for all known tokens; False if that leaves fewer than ``spare``.

        Also False if another sequence is about to compute the page after the last hit.
        """
        if not self.fits(sequence, found, spare):
            return False
        shared = self._find(sequence)
        if shared is None or not self.fits(sequence, sequence.found, spare):
            return False
        self._pages.share(shared)
        total = pages_for(sequence.num_tokens, self.page_size)
        sequence.pages = shared + self._pages.alloc(total - len(shared))
        sequence.num_computed_tokens = len(shared) * self.page_size
        if sequence.salt is not None:
            keys, count = self._keys(sequence)
            self.tokens_looked_up += count * self.page_size
            self.tokens_found += sequence.num_computed_tokens
            for key in keys[len(shared) : count]:
                self._computing.setdefault(key, sequence)
        return True

    def can_grow(self) -> bool:
        """Whether a page is free or cached."""
        return self._pages.can_alloc(1)

    def grow(self, sequence: Sequence) -> None:
        """Give it one more page. Ask ``can_grow`` first."""
        sequence.pages += self._pages.alloc(1)

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Known tokens from start to end are planned: cache the pages that they fill."""
        first, last = start // self.page_size, end // self.page_size
        if first == last or sequence.salt is None:
            return
        keys = sequence.page_keys_to(last, self.page_size)
        for page in range(first, last):
            self._pages.keep(sequence.pages[page], keys[page])
            self._is_computed(keys[page], sequence)

    def release(self, sequence: Sequence) -> None:
        """Take its pages back; those filled with known output tokens go into the cache first.

        Steps in flight may still write to the pages, but they run before any new owner's.
        """
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        if known > sequence.num_prefill_tokens:
            self.computed(sequence, sequence.num_prefill_tokens, known)
        for key in sequence.page_keys:
            self._is_computed(key, sequence)
        self._pages.free(reversed(sequence.pages))
        sequence.pages = []
        sequence.num_computed_tokens = 0

    def num_exclusive(self, sequences: Iterable[Sequence]) -> int:
        """Pages that would come free if these sequences were released."""
        return self._pages.num_exclusive(page for sequence in sequences for page in sequence.pages)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop what these sequences computed from the cache, also where they are released."""
        for sequence in sequences:
            self._pages.forget_keys(sequence.page_keys)

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self._pages.forget_all()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that running sequences own their pages, and only they compute prefixes."""
        self._pages.check_integrity(page for sequence in running for page in sequence.pages)
        awaited = {sequence.request_id for sequence in self._computing.values()}
        lost = awaited - {sequence.request_id for sequence in running}
        assert not lost, f"prefixes are awaited from {lost}, which do not run"

    def _find(self, sequence: Sequence) -> list[int] | None:
        """Pages of the prefix hit; None if another sequence is about to fill the next one."""
        if not self._may_share(sequence):
            return []
        keys, count = self._keys(sequence)
        pages = self._pages.find(keys[:count])
        sequence.found = Found(len(pages), len(pages) - self._pages.num_unowned(pages))
        if len(pages) < count and keys[len(pages)] in self._computing:
            return None
        return pages

    def _may_share(self, sequence: Sequence) -> bool:
        """Not while log-probabilities of the prompt are to be computed: pages do not hold them."""
        params, prompt = sequence.params, sequence.prompt_token_ids
        done = params.prompt_logprobs is None or sequence.num_prompt_logprobs >= len(prompt)
        return sequence.salt is not None and done

    def _keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Keys of its full pages, and how many of them may be prefix hits."""
        count = (sequence.num_tokens - 1) // self.page_size
        return sequence.page_keys_to(count, self.page_size), count

    def _is_computed(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]
