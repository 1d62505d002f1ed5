"""The device's memory, for the scheduler's model checker, where a token is a number that stands for
it and all before it.

So a page with two writers, one that is handed out while it is read, and one that is shared with
somebody whose tokens differ are found where it is read; and so with states, kept logits, and slots
of adapters.
"""

from collections.abc import Iterable
from random import Random

from caching.cache_groups import CacheGroups
from caching.page_manager import SINK_PAGE, SINK_SLOT
from engine.scheduling.constraints.late_samples import MOST_KEPT
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from scripts.benchmarks.histories.life import Life
from scripts.benchmarks.histories.simulated_drafts import Row
from scripts.benchmarks.histories.simulated_host import SimulatedHost

NOBODYS = -1
"""Stands for what follows a wrong draft."""


class SimulatedDevice:
    """Runs steps on pages of these ``groups``; all that it finds wrong is an AssertionError."""

    def __init__(self, groups: CacheGroups, *, has_states: bool, has_state_host: bool, has_adapters: bool) -> None:
        self._groups = groups
        self._has_states = has_states
        self._has_adapters = has_adapters
        self._adapter_slots: dict[int, int] = {}
        """By slot, the adapter that was written to it last."""
        self._spoilt: dict[str, int] = {}
        """Of sequences whose logits were not finite, how many had got a slot by then."""
        self._content: dict[tuple[int, int], tuple[int, int, int, str]] = {}
        """By page and place in it, the group and history that were written there last, since when its writer had a slot, and
        its id."""
        self._states: dict[tuple[int, int], tuple[list[int], int]] = {}
        """By slot, and 0, the histories that it has states of, and the same of its writer."""
        self._kept: dict[NextIterationPlan, dict[Sequence, int]] = {}
        """By plan and sequence, the history that kept logits are made from."""
        self._hosts = [SimulatedHost(self._content, groups.page_size)]
        """Of pages, and of states if they have a tier."""
        if has_state_host:
            self._hosts.append(SimulatedHost(self._states, 1))

    def copy(self, plan: NextIterationPlan) -> None:
        """What of a plan's copies is done before its step."""
        for copies in plan.copies:
            self._hosts[copies.of_states].run(copies)

    def land_copies(self, random: Random, *, all_of_them: bool) -> list[tuple[int, int]]:
        """Some of the copies on their way, the oldest first, have arrived: how many stores and
        fetches, by host."""
        counts = []
        for host in self._hosts:
            under_way = host.stores, host.fetches
            stores, fetches = (count if all_of_them else random.randint(0, count) for count in under_way)
            host.stores, host.fetches = host.stores - stores, host.fetches - fetches
            counts.append((stores, fetches))
        return counts

    def run(
        self, plan: NextIterationPlan, lives: list[Life], rows: list[Row], in_flight: Iterable[NextIterationPlan]
    ) -> None:
        """The step of a plan, whose rows are of these ``lives``, behind the steps ``in_flight``."""
        self._write_and_read_adapters(plan, in_flight)
        self._write_and_read(lives, rows)
        self._read_and_write_states(plan, lives, rows)
        if plan.late:
            self._kept[plan] = {plan.sequences[row]: lives[row].histories[rows[row].start] for row in plan.late}
        assert len(self._kept) <= MOST_KEPT, "the logits of too many steps are kept"

    def spoil(self, request_id: str, num_begun: int) -> None:
        """Logits of a sequence were not finite: nobody who gets a slot later may find what it has written."""
        self._spoilt[request_id] = num_begun

    def sample_late(self, plan: NextIterationPlan, lives: list[Life]) -> None:
        """Rows sample from the logits that are kept of them."""
        of = plan.samples_of
        assert of is not None and plan.num_rows
        for row, (sequence, life) in enumerate(zip(plan.sequences, lives, strict=True)):
            history, last = self._kept[of].pop(sequence), plan.starts[row] - 1
            assert sequence.slot >= 0 and history == life.histories[last], "a row samples from another's logits"
            assert plan.counts[row] == of.counts[of.sequences.index(sequence)], "a row samples too little"

    def forget_logits(self, plan: NextIterationPlan) -> None:
        """Nobody reads those that are kept of a step; one that has failed kept none."""
        self._kept.pop(plan, None)

    def lose(self, *, keep_host: bool) -> None:
        """What is in pages and states is lost, and unless ``keep_host``, adapters and what is in the
        host's memory, too."""
        self._kept.clear()
        self._content.clear()
        self._states.clear()
        if not keep_host:
            self._adapter_slots.clear()
            for host in self._hosts:
                host.lose_copies()

    def _write_and_read(self, lives: list[Life], rows: list[Row]) -> None:
        """All rows write, and then each reads all there is of its own. Behind a wrong draft it
        writes nobody's tokens."""
        written: set[tuple[int, int]] = set()
        each = [
            (group, life, row)
            for life, row in zip(lives, rows, strict=True)
            for group in range(len(self._groups.windows))
        ]
        for group, life, row in each:
            for place in range(row.start, row.start + row.count):
                slot = self._slot(life.sequence, group, place)
                assert slot not in written, f"page {slot[0]} has two writers"
                written.add(slot)
                history = life.histories[place] if place < row.start + row.kept else NOBODYS
                self._content[slot] = group, history, life.since, life.sequence.request_id
        for group, life, row in each:
            window = self._groups.windows[group]
            for place in range(0 if window is None else max(0, row.start - window + 1), row.start + row.kept):
                nothing = group, NOBODYS, 0, ""
                its_group, history, since, writer = self._content.get(self._slot(life.sequence, group, place), nothing)
                assert (its_group, history) == (group, life.histories[place]), "a page holds another's tokens"
                assert since >= life.since, "a page was found that is forgotten"
                spoilt = self._spoilt.get(writer)
                assert spoilt is None or life.number <= spoilt, "a page was found of one whose logits were not finite"

    def _write_and_read_adapters(self, plan: NextIterationPlan, in_flight: Iterable[NextIterationPlan]) -> None:
        """Adapters are written to slots that no step in flight reads, and each row finds its own."""
        for uid, slot in plan.adapter_loads:
            assert all(slot not in step.read_slots for step in in_flight), "a slot is overwritten while it is read"
            self._adapter_slots[slot] = uid
        if self._has_adapters:
            found = [self._adapter_slots.get(slot, 0) if slot >= 0 else 0 for slot in plan.adapter_slots]
            assert found == [sequence.adapter_id for sequence in plan.sequences], "a row has another's adapter"

    def _read_and_write_states(self, plan: NextIterationPlan, lives: list[Life], rows: list[Row]) -> None:
        """All rows read the states before them, and then each writes its own: where it has drafts,
        all those before and behind tokens that are its sequence's."""
        count = plan.num_rows if self._has_states else 0
        assert len(plan.state_sources) == len(plan.state_slots) == count, "a row has no state"
        assert len(set(plan.state_slots)) == count and SINK_SLOT not in plan.state_slots, "a slot has two writers"
        each = list(zip(lives, rows, plan.state_sources, plan.state_slots, strict=False))
        for life, row, source, slot in each:
            assert source not in plan.state_slots or source == slot, "a state is read and overwritten"
            found, since = self._states.get((source, 0), ([], 0))
            if source == SINK_SLOT:
                assert not row.start, "a sequence begins anew in its midst"
            else:
                assert life.histories[row.start - 1] in found, "a state is another's, or of another time"
                assert since >= life.since, "a state was found that is forgotten"
        for number, (life, row, _, slot) in enumerate(each):
            end = row.start + row.kept
            first = row.start if number < plan.num_decodes and row.count > 1 else end
            self._states[slot, 0] = life.histories[first - 1 : end], life.since

    def _slot(self, sequence: Sequence, group: int, place: int) -> tuple[int, int]:
        page = sequence.pages[group][place // self._groups.page_size]
        assert page != SINK_PAGE, "a page that is needed was let go"
        return page, place % self._groups.page_size
