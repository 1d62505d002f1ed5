"""Prefix hits on the device: which pages and which state of a waiting sequence are there."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf

from caching.cache_groups import CacheGroups
from caching.page_manager import NOTHING_FOUND, Found, HBMPageManager
from caching.prefix_cache import KeysInGroup, in_group
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.sequence import Sequence


class PrefixHits:
    """Looks for hits, and knows the pages that admitted sequences are about to fill.

    Whoever has such a page as its next waits for it. In a model with ``states`` it waits for the
    plan behind: what a row writes of a state, no other row of its step reads.
    """

    def __init__(self, pages: HBMPageManager, groups: CacheGroups, states: SequenceStates | None) -> None:
        self._pages = pages
        self._groups = groups
        self._states = states
        self._computing: dict[bytes, Sequence] = {}
        """By key, the pages that admitted sequences have yet to fill."""
        self._planned: list[tuple[Sequence, bytes]] = []
        """Those of them that this plan fills, in a model with states."""
        self.tokens_looked_up = 0
        """Tokens of admitted sequences that the prefix cache could have held."""
        self.tokens_found = 0
        """Those of them that were prefix hits."""

    def find(self, sequence: Sequence) -> Found | None:
        """About the prefix hit of a waiting sequence; None while another computes more.

        It costs what has changed since the last time, as most sequences that wait go on waiting.
        """
        if not self.may_share(sequence):
            return NOTHING_FOUND
        keys, count = self.keys(sequence)
        if count and keys[count - 1] in self._computing:  # and so is all before it that is not held
            sequence.window_hit = -1, 0
            return None
        last = sequence.chains or [NOTHING_FOUND] * len(self._groups.full)
        sequence.chains = [
            self._pages.recount(keys_in_group(keys, group), count, last[number])
            for number, group in enumerate(self._groups.full)
        ]
        return self._hit(sequence, keys, count)

    def find_exactly(self, sequence: Sequence) -> Found | None:
        """The prefix hit; None if another sequence is about to fill the page behind it."""
        if not self.may_share(sequence):
            return NOTHING_FOUND
        keys, count = self.keys(sequence)
        sequence.window_hit = -1, 0
        chains = [self._pages.find(keys_in_group(keys[:count], group)) for group in self._groups.full]
        sequence.chains = [Found(len(pages), self._num_owned(pages)) for pages in chains]
        hit = self._hit(sequence, keys, count)
        if hit is None:
            return None
        # Behind a shorter hit, the chains may have pages of an owner that has copies of those before.
        return Found(hit.held, sum(self._num_owned(pages[: hit.held]) for pages in chains))

    def begin(self, sequence: Sequence, held: int) -> None:
        """A sequence was admitted with a hit of ``held`` pages, and computes what is behind it."""
        if sequence.salt is None:
            return
        keys, count = self.keys(sequence)
        page_size = self._groups.page_size
        if self.may_share(sequence):
            self.tokens_looked_up += count * page_size
            self.tokens_found += held * page_size
        elif len(self._groups.full) == len(self._groups.windows) and self._states is None:
            held = min(len(self._pages.find(keys_in_group(keys[:count], group))) for group in self._groups.full)
        for key in keys[held:count]:
            self._computing.setdefault(key, sequence)

    def computed(self, sequence: Sequence, keys: ListOf[bytes]) -> None:
        """The plan fills pages of these keys."""
        if self._states is not None:
            self._planned += [(sequence, key) for key in keys]
            return
        for key in keys:
            self._is_computed(key, sequence)

    def end_plan(self) -> None:
        """All rows of the plan are known: the next one may read what they write."""
        for sequence, key in self._planned:
            self._is_computed(key, sequence)
        self._planned.clear()

    def release(self, sequence: Sequence) -> None:
        """It computes no more."""
        for key in sequence.page_keys if self._computing else ():
            self._is_computed(key, sequence)

    def forget_all(self) -> None:
        """Nobody waits for what running sequences are about to compute."""
        self._computing.clear()
        self._planned.clear()

    def may_share(self, sequence: Sequence) -> bool:
        """Not while log-probabilities of the prompt are to be computed: pages do not hold them."""
        params, prompt = sequence.params, sequence.prompt_token_ids
        done = params.prompt_logprobs is None or sequence.num_prompt_logprobs >= len(prompt)
        return sequence.salt is not None and done

    def keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Keys of its full pages, and how many of them may be prefix hits."""
        count = (sequence.num_tokens - 1) // self._groups.page_size
        return sequence.page_keys_to(count, self._groups.page_size), count

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that prefixes are awaited from running sequences alone."""
        awaited = {sequence.request_id for sequence in self._computing.values()}
        lost = awaited - {sequence.request_id for sequence in running}
        assert not lost, f"prefixes are awaited from {lost}, which do not run"

    def _hit(self, sequence: Sequence, keys: list[bytes], count: int) -> Found | None:
        """The hit of which every group has what it needs; None if it is to wait for more.

        ``owned`` counts only where all tokens are kept: in a window, each owner takes a page.
        """
        chains, held = sequence.chains, count
        for found in chains:
            held = min(held, found.held)
        if self._states is not None:
            held = self._hit_of_states(self._states, keys, held)
        elif self._groups.windowed:
            held = self._hit_of_windows(sequence, keys, held)
        if held < count and keys[held] in self._computing:
            sequence.window_hit = -1, 0
            return None
        if len(chains) == 1 and chains[0].held == held:
            return chains[0]
        return Found(held, sum(min(chain.owned, held) for chain in chains))

    def _hit_of_states(self, states: SequenceStates, keys: list[bytes], held: int) -> int:
        """Of ``held`` pages those at whose end a state is kept and all windows are known."""
        return next((hit for hit in states.hits(keys, held) if self._hit_of_groups(keys, hit) == hit), 0)

    def _hit_of_windows(self, sequence: Sequence, keys: list[bytes], held: int) -> int:
        """Of ``held`` pages those at whose end all windows are known. A longer hit than the last
        one is looked for only where more pages are held, or another has computed some; of the last
        one's windows the pages at both ends are, and ``find_exactly`` looks for all."""
        before, hit = sequence.window_hit
        if held == before and self._groups.ends_are_kept(hit, self._is_kept(keys)):
            return hit
        hit = self._hit_of_groups(keys, hit if held == before else held)
        sequence.window_hit = held, hit
        return hit

    def _hit_of_groups(self, keys: list[bytes], held: int) -> int:
        """Of ``held`` pages those at whose end all windows are known."""
        return self._groups.hit(held, self._is_kept(keys))

    def _is_kept(self, keys: list[bytes]) -> Callable[[int, int], bool]:
        return lambda page, group: self._pages.is_kept(in_group(keys[page], group))

    def _num_owned(self, pages: list[int]) -> int:
        return len(pages) - self._pages.num_unowned(pages)

    def _is_computed(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]


def keys_in_group(keys: list[bytes], group: int) -> ListOf[bytes]:
    """Keys of pages as they are in a group of layers."""
    return KeysInGroup(keys, group) if group else keys
