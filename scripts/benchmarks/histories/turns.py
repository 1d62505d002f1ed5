"""Whose turn it is, for the scheduler's model checker: in what order sequences get their slots, and
who may be given how much."""

from collections import deque
from collections.abc import Mapping
from itertools import chain

from engine.scheduling.backfill import MOST_PASSED
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting.waiting_queue import OUTPUT_WEIGHT
from scripts.benchmarks.histories.life import LONGEST_OUTPUT, LONGEST_PROMPT, Life

MOST_SEQUENCES = 6
"""With a slot."""
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 1.0}
"""Shares of the clients."""
USERS = ("", "", "another")
"""Of each of them."""
CHARGED_AT_MOST = LONGEST_PROMPT + LONGEST_OUTPUT + OUTPUT_WEIGHT * LONGEST_OUTPUT * MOST_SEQUENCES
MOST_GIVEN = 2 * CHARGED_AT_MOST + MOST_PASSED * LONGEST_PROMPT
"""Tokens, for its weight, that one client may be given while another of the same priority waits that could start: twice what
may be charged to that one at once, which is how far ahead of all others it can be (Sheng et al. 2024, theorem 4.4, has the
same form), and what may pass one that lacks pages."""


class Turns:
    """Who waits, and what others are given meanwhile.

    Prompts of more than ``long`` tokens have a part of the step, which may be used up. Unless the
    scheduler is ``fair``, clients may be given anything.
    """

    def __init__(self, page_size: int, long: int, *, fair: bool) -> None:
        self._page_size = page_size
        self._long = long
        self._fair = fair
        self._queues: dict[tuple[str, int], dict[str, deque[str]]] = {}
        """Ids by client and priority, and by user, of those that have no slot, in the order in which they are to get one."""
        self._admitted: set[str] = set()
        """Those that have a slot, or had one that they have lost since the last plan."""
        self._given: dict[tuple[str, int], dict[str, float]] = {}
        """By client and priority, while somebody of them waits, what other clients have been given meanwhile."""

    def add(self, sequence: Sequence) -> None:
        """It waits behind all others of its client, user and priority."""
        level = sequence.client, sequence.params.priority
        self._queues.setdefault(level, {}).setdefault(sequence.user, deque()).append(sequence.request_id)
        self._given.setdefault(level, dict.fromkeys(WEIGHTS, 0.0))

    def end(self, sequence: Sequence) -> None:
        """It has ended, in whatever way."""
        queue = self._queue(sequence)
        if sequence.request_id in queue:
            queue.remove(sequence.request_id)

    def check(self, plan: NextIterationPlan, alive: Mapping[str, Life]) -> None:
        """Of one user and one priority, those that came first get a slot first; whoever lost it,
        before them.

        Who could not start is passed, and who lacked nothing but pages, not often. ``alive`` are
        all that have not ended.
        """
        for life in sorted(alive.values(), key=lambda life: -life.sequence.arrival):
            sequence = life.sequence
            if sequence.request_id in self._admitted and (sequence.slot < 0 or sequence in plan.admitted):
                self._admitted.remove(sequence.request_id)
                self._queue(sequence).appendleft(sequence.request_id)
        for sequence in plan.admitted:
            self._admitted.add(sequence.request_id)
            queue = self._queue(sequence)
            for request_id in list(queue)[: queue.index(sequence.request_id)]:
                self._check_passed(alive[request_id], plan, alive)
            queue.remove(sequence.request_id)
            self._check_turn(sequence, plan, alive)

    def _check_passed(self, life: Life, plan: NextIterationPlan, alive: Mapping[str, Life]) -> None:
        if self._may_start(life.sequence, plan, alive):
            life.num_passed += 1
            assert life.num_passed <= MOST_PASSED, "somebody is overtaken in the queue time and again"

    def _may_start(self, sequence: Sequence, plan: NextIterationPlan, alive: Mapping[str, Life]) -> bool:
        """Whether it surely needs nothing but a slot and pages: no mask, nobody's prefix, no part of a step for long prompts."""
        return not (
            sequence.num_loading
            or sequence.awaits_mask
            or sequence.adapter_id
            or sequence.num_tokens > self._long
            or any(self._computes_for(life.sequence, sequence, plan) for life in alive.values())
        )

    def _computes_for(self, other: Sequence, sequence: Sequence, plan: NextIterationPlan) -> bool:
        """Whether the other computes a prompt whose first page is the sequence's too, in this plan or later."""
        computes = other.slot >= 0 and (other.prefilling or other in plan.sequences[plan.num_decodes :])
        first = sequence.prompt_token_ids[: self._page_size]
        alike = sequence.salt == other.salt is not None and other.prompt_token_ids[: self._page_size] == first
        return computes and alike

    def _check_turn(self, sequence: Sequence, plan: NextIterationPlan, alive: Mapping[str, Life]) -> None:
        """Nobody who could start waits while another client is given more and more."""
        client, priority = sequence.client, sequence.params.priority
        self._given[client, priority] = dict.fromkeys(WEIGHTS, 0.0)
        for (other, level), given in self._given.items():
            if level == priority and other != client:
                more = len(sequence.prompt_token_ids) / WEIGHTS[client]
                waiting = chain.from_iterable(self._queues[other, level].values())
                waits = any(self._may_start(alive[one].sequence, plan, alive) for one in waiting)
                given[client] = given[client] + more if waits else 0.0
                assert not self._fair or given[client] <= MOST_GIVEN, f"{other} waits while {client} is served"

    def _queue(self, sequence: Sequence) -> deque[str]:
        return self._queues[sequence.client, sequence.params.priority][sequence.user]
