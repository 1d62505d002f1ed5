"""Which adapter is in which slot of the device.

A sequence with an adapter runs while that is in a slot, which the sequence pins. A slot that
nobody pins keeps its adapter until another one needs it, the one that was used longest ago first.
It is given away only when every step in flight that reads it has landed: a step must never meet
another's adapter, in whatever order the device runs the write (vLLM issue 47724). What has to be
written to a slot goes with the plan of the first step that reads it.

A removed adapter stays for the sequences that have it, and is forgotten with the last of them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence

NO_SLOT = -1


@dataclass
class _Known:
    """An adapter that sequences may have."""

    slot: int | None = None
    num_sequences: int = 0
    num_running: int = 0
    removed: bool = False


class AdapterSlots:
    """The slots of adapters, of which there may be none. Part of the scheduler: no device here."""

    def __init__(self, num_slots: int = 0) -> None:
        self._uids: list[int | None] = [None] * num_slots
        """By slot, the adapter in it, or that will be once the next plan has run."""
        self._pins = [0] * num_slots
        """By slot, the running sequences that have it."""
        self._in_flight = [0] * num_slots
        """By slot, the steps in flight that read it."""
        self._used = [0] * num_slots
        """By slot, when it was pinned or released last, counted."""
        self._clock = 0
        self._known: dict[int, _Known] = {}
        self._in_use: dict[int, _Known] = {}
        """Those that sequences have."""
        self._loads: dict[int, int] = {}
        """By slot, the adapter that is to be written to it."""
        self._forgotten: list[int] = []
        self._num_loads = 0
        """Writes to slots that were planned."""
        self._num_evictions = 0
        """Those that took another adapter's slot."""

    def add(self, uid: int) -> None:
        """An adapter that was not here before."""
        assert uid > 0 and uid not in self._known, f"adapter {uid} is here already"
        self._known[uid] = _Known()

    def remove(self, uid: int) -> None:
        """Forget an adapter when no sequence has it any more."""
        self._known[uid].removed = True
        self._forget_if_unused(uid)

    def __contains__(self, uid: int) -> bool:
        return uid in self._known

    def enter(self, sequence: Sequence) -> None:
        """A sequence was queued. It has no adapter, or one that is here."""
        if sequence.adapter_id:
            adapter = self._in_use[sequence.adapter_id] = self._known[sequence.adapter_id]
            adapter.num_sequences += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended, and is not pinned."""
        if sequence.adapter_id:
            adapter = self._known[sequence.adapter_id]
            adapter.num_sequences -= 1
            if not adapter.num_sequences:
                del self._in_use[sequence.adapter_id]
            self._forget_if_unused(sequence.adapter_id)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence's adapter has a slot, or could have one now."""
        if not sequence.adapter_id:
            return True
        return self._known[sequence.adapter_id].slot is not None or self._free_slot() is not None

    @property
    def has_unpinned(self) -> bool:
        """Whether no running sequence has one of the slots: it is free, or will be when steps have landed."""
        return not all(self._pins)

    def pin(self, sequence: Sequence) -> None:
        """A sequence is about to run; there is room for its adapter."""
        if not sequence.adapter_id:
            return
        adapter = self._known[sequence.adapter_id]
        if adapter.slot is None:
            adapter.slot = self._take_slot(sequence.adapter_id)
        adapter.num_running += 1
        sequence.adapter_slot = adapter.slot
        self._pins[adapter.slot] += 1
        self._touch(adapter.slot)

    def release(self, sequence: Sequence) -> None:
        """A sequence does not run any more."""
        if sequence.adapter_id:
            self._known[sequence.adapter_id].num_running -= 1
            self._pins[sequence.adapter_slot] -= 1
            self._touch(sequence.adapter_slot)
            sequence.adapter_slot = NO_SLOT

    def plan(self, plan: NextIterationPlan) -> None:
        """Note what the rows of a plan read, and what has to be written before."""
        if not self._uids:
            return
        plan.adapter_slots = [sequence.adapter_slot for sequence in plan.sequences]
        for slot in plan.read_slots:
            self._in_flight[slot] += 1
        plan.adapter_loads = [(uid, slot) for slot, uid in self._loads.items()]
        self._num_loads += len(self._loads)
        self._loads = {}

    def landed(self, plan: NextIterationPlan) -> None:
        """A step has landed."""
        for slot in plan.read_slots:
            self._in_flight[slot] -= 1

    def lose(self) -> None:
        """What is in the slots is lost, and so are the steps in flight. Nothing is pinned."""
        assert not any(self._pins), "a sequence runs"
        for adapter in self._known.values():
            adapter.slot = None
        self._uids = [None] * len(self._uids)
        self._in_flight = [0] * len(self._uids)
        self._loads = {}

    def take_forgotten(self) -> list[int]:
        """The adapters that are not here any more, since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def stats(self) -> dict[str, Any]:
        """The part of EngineStats that is about adapters."""
        waiting = {uid: known.num_sequences - known.num_running for uid, known in self._in_use.items()}
        return {
            "max_loras": len(self._uids),
            "adapter_loads": self._num_loads,
            "adapter_evictions": self._num_evictions,
            "adapters_running": {uid: known.num_running for uid, known in self._in_use.items() if known.num_running},
            "adapters_waiting": {uid: count for uid, count in waiting.items() if count},
        }

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that slots are counted right, and that each running sequence has its adapter's."""
        pins = Counter(sequence.adapter_slot for sequence in running if sequence.adapter_id)
        assert all(self._pins[slot] == pins[slot] for slot in range(len(self._pins))), "a slot's pins are wrong"
        for sequence in running:
            uid = self._uids[sequence.adapter_slot] if sequence.adapter_slot != NO_SLOT else 0
            assert uid == sequence.adapter_id, f"{sequence.request_id} runs with another's adapter"
        for slot, uid in enumerate(self._uids):
            assert uid is None or self._known[uid].slot == slot, f"slot {slot} has two adapters"
        assert all(count >= 0 for count in self._in_flight), "a step landed twice"
        in_use = {uid for uid, adapter in self._known.items() if adapter.num_sequences}
        assert self._in_use.keys() == in_use, "adapters are in use that no sequence has, or the other way round"

    def _free_slot(self) -> int | None:
        """An empty slot, or the one that was used longest ago, that no step will read."""
        idle = [slot for slot, pins in enumerate(self._pins) if not pins and not self._in_flight[slot]]
        return min(idle, key=lambda slot: (self._uids[slot] is not None, self._used[slot]), default=None)

    def _take_slot(self, uid: int) -> int:
        slot = self._free_slot()
        assert slot is not None, "there is no room for this adapter"
        before = self._uids[slot]
        if before is not None:
            self._known[before].slot = None
            self._num_evictions += 1
        self._uids[slot], self._loads[slot] = uid, uid
        return slot

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

    def _forget_if_unused(self, uid: int) -> None:
        adapter = self._known[uid]
        if not adapter.removed or adapter.num_sequences:
            return
        del self._known[uid]
        self._forgotten.append(uid)
        if adapter.slot is not None:
            self._uids[adapter.slot] = None
            self._loads.pop(adapter.slot, None)
