"""The recurrent states of sequences: which slot each reads and writes, and which states are kept.

A running sequence has a slot of its own, which each of its steps writes. The state behind a full
page is kept by giving the sequence another slot to write to: it is found by the page's key like
the page itself, and a sequence that begins there reads it. States are kept where a row ends at
the end of a page:

- The chunks of a prompt end there, where they lose little by it (``LEFT_OUT``); its last full page
  ends one, if that is ``WORTH_A_STEP``; and so does what is known of its pages where no state is,
  as other prompts are likely to branch off there too.
- While a sequence decodes, the state behind its last full page is kept, also where that ends among
  the tokens of a row with drafts, as its slot may be read there, too (caching/state/table.py). As the
  tokens of that page may be in flight, it can be found only later, when they have landed and no
  draft before its end was wrong: a request that has ended, or was preempted, goes on from there.

Of the states that one sequence keeps, each is evicted before all others as soon as the next one
is kept, but for those at a prompt's end and where others branched off. There is a slot for every
sequence that may run; only those beyond are for kept states, so a sequence never waits for one.

Kept states go to the host and come back like pages (caching/host_tier.py), if the slots have a
tier there: all but those that their own sequence has passed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf

from caching.host_tier import HostTier
from caching.page_manager import SINK_SLOT, HBMPageManager
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence

WORTH_A_STEP = 4
"""Pages that a state at a prompt's end has to save whoever may come for it: without it the prompt
takes a step less. Where it is known that prompts are shared, a state is always worth it."""
LEFT_OUT = 4
"""A chunk that could be longer ends with a page if it loses no more than one token in so many."""


class SequenceStates:
    """Gives running sequences slots and keeps states, for SequenceMemory."""

    def __init__(self, slots: HBMPageManager, page_size: int, max_num_seqs: int) -> None:
        assert slots.num_total >= max_num_seqs, "there are fewer slots than sequences that may run"
        self.slots = slots
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._most_known = slots.num_total + (0 if slots.tier is None else slots.tier.num_slots)
        """States that are kept at once, at the very most."""
        self._num_running = 0
        self._lengths: dict[bytes, int] = {}
        """By key, the pages of prefixes whose states are kept, or were not long ago."""
        self._distinct: list[int] = []
        """These lengths, each once, ascending."""

    @property
    def tier(self) -> HostTier | None:
        """The states in the host's memory, if there are any."""
        return self.slots.tier

    @property
    def num_to_keep(self) -> int:
        """Slots beyond one for each sequence that may run."""
        return self.slots.num_total - self._max_num_seqs

    @property
    def num_unused(self) -> int:
        """Those of them that hold nothing."""
        return self._spare() - self.slots.num_cached

    def is_kept(self, key: bytes) -> bool:
        """Whether the device has the state behind the page of this key."""
        return self.slots.is_kept(key)

    def hits(self, keys: ListOf[bytes], most: int, *, on_host: bool = False) -> Iterator[int]:
        """By how many pages of a chain, ``most`` at most, a state is kept; the most first.

        ``on_host`` counts those that the host has alone.
        """
        is_there = self._is_known if on_host else self.is_kept
        lengths = self._distinct[: bisect_right(self._distinct, most)] if most else []
        return (length for length in reversed(lengths) if is_there(keys[length - 1]))

    def begin(self, sequence: Sequence, key: bytes | None) -> None:
        """Give it a slot; it reads the state of the key first, or zeros."""
        may_share = self._spare() > 0
        self._num_running += 1
        if key is not None:
            source = self.slots.find([key])
            may_share |= not self.slots.num_unowned(source)
            self.slots.share(source)
            [sequence.state_source] = source
            if not may_share:  # no slot is left to keep it in: the sequence writes in its place
                if self.tier is not None:
                    self.tier.evict(sequence.state_source, key)
                self.slots.forget(source)
                sequence.state_slot = sequence.state_source
                return
        [sequence.state_slot] = self.slots.alloc(1)

    def begin_from_host(self, sequence: Sequence, key: bytes) -> tuple[int, int]:
        """Give it a slot. Returns the pinned slot of the host with the state of the key, and that
        of the device to which it is to be copied, before the sequence reads it."""
        assert self.tier is not None
        host_slot = self.tier.pin(key)  # first: what is evicted now may take it
        may_keep = self._spare() > 0
        self._num_running += 1
        [sequence.state_source] = self.slots.alloc(1)
        sequence.state_slot = self.slots.alloc(1)[0] if may_keep else sequence.state_source
        return host_slot, sequence.state_source

    def loaded(self, sequence: Sequence) -> None:
        """What was on its way from the host has come: others may read the state that it begins
        with."""
        if sequence.state_source in (sequence.state_slot, SINK_SLOT) or not sequence.can_be_found:
            return
        key = self._key(sequence, sequence.num_computed_tokens)
        if not self.slots.is_kept(key):
            self.slots.keep(sequence.state_source, key)
            self._note_length(key, sequence.num_computed_tokens // self._page_size)

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Where a row that could end at token ``end`` of its prompt ends, so that it is kept."""
        start, known = sequence.num_computed_tokens, sequence.num_prefill_tokens
        if not sequence.can_be_found:
            return end
        last = self._last_page_end(sequence)
        if start < sequence.branch < end:
            return sequence.branch
        if start + WORTH_A_STEP * self._page_size <= last < end:
            return last
        left_out = end % self._page_size
        return end - left_out if end < known and left_out <= (end - start) // LEFT_OUT else end

    def begin_plan(self, now: float) -> None:
        """``now`` is the time in seconds, as for HBMPageManager."""
        self.slots.now = now

    def end_plan(self, plan: NextIterationPlan) -> None:
        """Write down what each row of the plan reads and writes, and keep what its chunks give.

        The next plan is the first that may read the one, or write to the other.
        """
        for sequence in plan.sequences:
            source, slot = sequence.state_source, sequence.state_slot
            plan.state_sources.append(source)
            plan.state_slots.append(slot)
            if source not in (slot, SINK_SLOT):
                self.slots.free([source])
            sequence.state_source = slot
            self._let_find(sequence)
        for row, sequence, start, count in zip(
            range(plan.num_rows), plan.sequences, plan.starts, plan.counts, strict=True
        ):
            last = (start + count) // self._page_size * self._page_size
            has_drafts = count > 1 and row < plan.num_decodes
            if last == start + count or (has_drafts and last > start):
                self._keep(sequence, last)

    def _keep(self, sequence: Sequence, tokens: int) -> None:
        """Keep the state of so many tokens, which its last row's slot has, if there is one to spare."""
        slot = sequence.state_slot
        if not sequence.can_be_found or self._spare() < 1:
            return
        if tokens <= sequence.num_tokens and self.slots.is_kept(self._key(sequence, tokens)):
            return
        self.slots.share([slot])
        sequence.passed_states.append((tokens, slot))
        [sequence.state_slot] = self.slots.alloc(1)
        self._let_find(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take its slots back. What is known of its states can be found from now on."""
        if sequence.state_slot == SINK_SLOT:
            return
        source, slot, tokens = sequence.state_source, sequence.state_slot, sequence.num_computed_tokens
        is_written = source == slot and not sequence.num_loading
        if is_written and sequence.can_be_found and tokens and tokens % self._page_size == 0:
            sequence.passed_states.append((tokens, slot))
        else:
            self.slots.free([slot])
        if source not in (slot, SINK_SLOT):
            self.slots.free([source])
        self._let_find(sequence)
        self.slots.free([slot for _, slot in sequence.passed_states])
        sequence.passed_states.clear()
        sequence.state_source = sequence.state_slot = SINK_SLOT
        sequence.last_state, sequence.branch = None, 0
        self._num_running -= 1

    def forget(self, sequence: Sequence) -> None:
        """Drop what the sequence computed, also where it is released."""
        self.slots.forget_keys(sequence.page_keys)

    def forget_all(self) -> None:
        """No state can be found any more."""
        self.lose_slots()
        if self.tier is not None:
            self.tier.forget_all()

    def lose_slots(self) -> None:
        """No state can be found on the device any more."""
        self.slots.forget_all()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that running sequences own their slots, and that there are some for all others."""
        owned: list[int] = []
        count = 0
        for sequence in running:
            count += 1
            assert sequence.state_slot != SINK_SLOT, "a running sequence has no slot"
            owned += {sequence.state_slot, sequence.state_source} - {SINK_SLOT}
            owned += [slot for _, slot in sequence.passed_states]
        self.slots.check_integrity(owned)
        assert count == self._num_running, f"{count} sequences run, and {self._num_running} have slots"
        assert self._spare() >= 0, "a slot was promised that is not there"

    def _spare(self) -> int:
        """Slots beyond those of sequences that run and those that may start."""
        waiting = self._max_num_seqs - self._num_running
        return self.slots.num_free + self.slots.num_cached - waiting

    def _let_find(self, sequence: Sequence) -> None:
        """Let others find the states that it has passed, as far as their tokens are known."""
        passed = sequence.passed_states
        while passed and passed[0][0] <= sequence.num_tokens:
            tokens, slot = passed.pop(0)
            if tokens and sequence.can_be_found:
                self._find_from_now(sequence, tokens, slot)
            self.slots.free([slot])

    def _find_from_now(self, sequence: Sequence, tokens: int, slot: int) -> None:
        key = self._key(sequence, tokens)
        if self.slots.is_kept(key):
            return
        self.slots.keep(slot, key)
        self._note_length(key, tokens // self._page_size)
        if sequence.last_state is not None:
            self.slots.evict_first(sequence.last_state)
        stays = tokens in (sequence.branch, self._last_page_end(sequence))
        sequence.last_state = None if stays else key

    def _note_length(self, key: bytes, length: int) -> None:
        if key not in self._lengths:
            self._lengths[key] = length
            at = bisect_left(self._distinct, length)
            if self._distinct[at : at + 1] != [length]:
                self._distinct.insert(at, length)
        if len(self._lengths) > 2 * self._most_known:
            self._lengths = {key: length for key, length in self._lengths.items() if self._is_known(key)}
            self._distinct = sorted(set(self._lengths.values()))

    def _is_known(self, key: bytes) -> bool:
        return self.slots.is_kept(key) or (self.tier is not None and key in self.tier)

    def _last_page_end(self, sequence: Sequence) -> int:
        """Tokens of the full pages before the last token of its prompt."""
        return (sequence.num_prefill_tokens - 1) // self._page_size * self._page_size

    def _key(self, sequence: Sequence, tokens: int) -> bytes:
        count = tokens // self._page_size
        return sequence.page_keys_to(count, self._page_size)[count - 1]
