"""A model checker for the scheduler: random histories of it, and what has to hold after each of
their steps.

The scheduler is driven as the engine drives it, with several plans in flight, by requests
(``simulated_requests``) that come, are aborted and run out of time at random, some of them in a
flood of one client's, some with a constraint whose masks are late and which may force tokens, or
say so, some without max_tokens, some with an adapter, of which there may be more than slots and
which are loaded, removed and loaded again; steps fail, and take the memory with them, or logits of
a row are not finite; weights change; pages go to the host and come back, in their own time. Beside
it stand models of the device's memory (``simulated_device``), of whose turn it is (``turns``), and
of what was said (``simulated_texts``): nobody is given texts of another salt or adapter, or such as
are forgotten. What a request gives does not depend on its neighbours (``life``), and a prefix may
be shared by whoever has the same.
"""

from collections import deque
from functools import partial
from random import Random

from engine.sampling.sampler import NO_TOKEN
from engine.scheduling.plan import NextIterationPlan, StepResult
from engine.scheduling.sequence import TokenLogprobs
from engine.step.failures import Failures
from engine.step.inputs.prompt_logprobs import prompt_logprobs_of
from scripts.benchmarks.histories.life import EOS, Life
from scripts.benchmarks.histories.random_scheduler import MOST_STATES, RandomScheduler
from scripts.benchmarks.histories.simulated_adapters import SimulatedAdapters
from scripts.benchmarks.histories.simulated_constraint import LateConstraint, check_constrained, check_masks, check_told
from scripts.benchmarks.histories.simulated_device import SimulatedDevice
from scripts.benchmarks.histories.simulated_drafts import Row
from scripts.benchmarks.histories.simulated_requests import SimulatedRequests
from scripts.benchmarks.histories.turns import WEIGHTS, Turns

FLOOD = 40
PATIENCE = 50
"""Plans that a sequence may take for each token of all sequences, at the very most."""


class SchedulerHistory:
    """One random history; ``step`` goes on with it, ``end`` lets all that is left finish. Both raise AssertionError."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._drawn = drawn = RandomScheduler(random)
        self._scheduler, self._drafts, self._texts = drawn.scheduler, drawn.drafts, drawn.texts
        self._failures = Failures(self._scheduler, 1)
        self._landings = random.choice((1, 4))
        """How often copies may land: seldom where the link is slow."""
        self._adapters = SimulatedAdapters(
            self._scheduler, self._texts, random, are_served=bool(drawn.num_adapter_slots)
        )
        self._requests = SimulatedRequests(random, drawn, self._adapters)
        self._in_flight: deque[NextIterationPlan] = deque()
        self._rows: deque[list[Row]] = deque()
        """What became of the rows of each."""
        self._alive: dict[str, Life] = {}
        self._ended: list[Life] = []
        self._num_forgotten, self._now = 0, 0.0
        self._num_begun = 0
        """Times that a sequence got a slot."""
        self._device = SimulatedDevice(
            drawn.groups,
            has_states=drawn.has_states,
            has_state_host=drawn.has_state_host,
            has_adapters=bool(drawn.num_adapter_slots),
        )
        self._turns = Turns(drawn.page_size, drawn.long, fair=drawn.fair)
        if random.random() > 0.8:  # above, so that the simplest history has none
            self._flood()

    def step(self) -> None:
        """One thing at random happens, and everything still holds."""
        often, seldom = [self._plan, self._land, self._answer, self._sample_late], [self._add, self._finish_one]
        rare = [self._fail_a_step, self._sleep, self._forget, self._learn, self._adapters.reload, self._update_weights]
        self._random.choice((*often * 8, *seldom * 4, *[self._land_copies] * self._landings, *rare))()
        self._check()

    def end(self) -> None:
        """Everybody finishes, with what they were to give, and nothing is left."""
        patience = PATIENCE * (1 + sum(len(life.tokens) for life in self._alive.values()))
        while self._alive or self._in_flight:
            planned = self._num_steps <= self._drawn.run_ahead and self._plan()
            if not planned and not self._in_flight:
                assert self._sample_late() or self._land_copies(all_of_them=True) or self._answer(), (
                    "work is left, but nothing can be planned and nothing will land"
                )
            elif not planned:
                self._land()
            if self._random.random() < 0.5:
                self._answer()
                self._sample_late()
                self._land_copies()
            self._check()
            patience -= 1
            assert patience, f"{sorted(self._alive)} never end"
        assert not self._drawn.pages.num_owned, "everybody has ended, and pages are owned"
        assert not self._drawn.slots.num_owned, "everybody has ended, and slots are owned"
        self._adapters.check_end()
        for life in self._ended:
            life.check_received()
            check_told(life)

    def _flood(self) -> None:
        client = self._random.choice(list(WEIGHTS))
        for _ in range(FLOOD):
            self._add(client)

    def _add(self, client: str | None = None) -> None:
        for life in self._requests.draw(self._ended, len(self._alive) + len(self._ended), client):
            self._alive[life.sequence.request_id] = life
            self._turns.add(life.sequence)
            self._scheduler.add(life.sequence)

    def _answer(self) -> bool:
        """One of the constraints that were told a token answers; whether there is one."""
        awaited = [life for life in self._alive.values() if life.sequence.awaits_mask]
        if not awaited:
            return False
        life = self._random.choice(awaited)
        constraint = life.sequence.constraint
        assert isinstance(constraint, LateConstraint)
        constraint.answer(self._random, life.output, self._drafts.most)
        constraint.error = "it has lost its way" if self._random.random() < 0.02 else None
        output = self._scheduler.resume(life.sequence)
        assert (output is not None) == (constraint.complete or constraint.error is not None)
        if output is not None:
            assert output.finish_reason == ("error" if constraint.error else "stop") and not output.token_ids
            life.reason = None if constraint.error else "complete"
            self._bury(output.request_id)
        return True

    def _sample_late(self) -> bool:
        """Rows whose masks have come sample from the logits that are kept of them; whether there are any."""
        plans = self._scheduler.plan_late()
        for plan in plans:
            lives = [self._alive[sequence.request_id] for sequence in plan.sequences]
            self._device.sample_late(plan, lives)
            for row in range(plan.num_rows):
                check_masks(plan, row)
            self._in_flight.append(plan)
            self._rows.append(self._drafts.run(plan, lives))
        return bool(plans)

    def _finish_one(self) -> None:
        """Aborted, out of time, or ended by a stop string: the scheduler is told the same."""
        if self._alive and self._random.random() < 0.5:
            request_id = self._random.choice(list(self._alive))
            assert self._scheduler.finish(request_id), "a sequence that has not ended is unknown"
            assert not self._scheduler.finish(request_id), "a sequence ended twice"
            self._bury(request_id)

    def _fail_a_step(self) -> None:
        """As in oEngine: who was in it ends, what was dispatched after it is dropped, and the pages hold nothing."""
        if self._in_flight and self._random.random() < 0.3:
            for sequence in self._in_flight[0].sequences:
                if self._scheduler.finish(sequence.request_id):
                    self._bury(sequence.request_id)
            self._in_flight.clear()
            self._rows.clear()
            self._lose_cache()

    def _lose_cache(self) -> None:
        """All memory holds nothing any more."""
        self._scheduler.lose_cache()
        self._texts.forget()
        self._device.lose(keep_host=False)

    def _sleep(self) -> None:
        """As in oEngine: the device's pages are lost and the host's are not, when all copies have landed."""
        if self._alive:
            return
        while self._in_flight:
            self._land()
        while self._land_copies(all_of_them=True):
            self._plan()
        self._scheduler.lose_cache(keep_host=True)
        self._texts.forget()
        self._device.lose(keep_host=True)

    def _forget(self) -> None:
        """The prefix cache is emptied; who runs keeps what it has."""
        if self._random.random() < 0.3:
            self._scheduler.forget_all()
            self._texts.forget()
            self._num_forgotten += 1

    def _update_weights(self) -> None:
        """As in oEngine: all steps land, and no row samples from what the former weights gave; or all is computed again."""
        while self._in_flight:
            self._land()
        if self._random.random() < 0.5:
            self._scheduler.lose_logits()
        else:
            self._lose_cache()
        assert not any(life.sequence.awaits_sample for life in self._alive.values())

    def _learn(self) -> None:
        """Copying pays, or it does not any more."""
        self._drawn.cost.token_seconds = self._random.random() / self._drawn.page_size

    def _land_copies(self, *, all_of_them: bool = False) -> bool:
        """Some of the copies on their way, the oldest first, have arrived; whether any has."""
        memory, counts = self._scheduler.memory, self._device.land_copies(self._random, all_of_them=all_of_them)
        if memory.host is None or not any(map(any, counts)):
            return False
        memory.host.landed(counts)
        return True

    def _plan(self) -> bool:
        """Whether there was something to plan."""
        if self._num_steps > self._drawn.run_ahead:
            return False
        for done in self._scheduler.take_done():
            self._device.forget_logits(done)
        had_slots = {life.sequence for life in self._alive.values() if life.sequence.slot >= 0}
        self._now += self._random.choice((0.0, 0.01, 1e6))
        plan = self._scheduler.plan(self._now)
        for life in self._alive.values():
            if life.sequence.slot >= 0 and life.sequence not in had_slots:
                self._texts.begin(life.sequence)
                life.since = self._num_forgotten
                self._num_begun += 1
                life.number = self._num_begun
        if plan is None:
            return False
        self._device.copy(plan)
        if not plan.num_tokens:
            return False
        self._drawn.check(plan, self._alive)
        self._turns.check(plan, self._alive)
        lives = [self._alive[sequence.request_id] for sequence in plan.sequences]
        rows = self._drafts.run(plan, lives)
        self._device.run(plan, lives, rows, self._in_flight)
        check_constrained(plan)
        self._in_flight.append(plan)
        self._rows.append(rows)
        return True

    @property
    def _num_steps(self) -> int:
        """Steps in flight."""
        return sum(plan.samples_of is None for plan in self._in_flight)

    def _land(self) -> None:
        if not self._in_flight:
            return
        plan, rows = self._in_flight.popleft(), self._rows.popleft()
        known = {**{life.sequence.request_id: life for life in self._ended}, **self._alive}
        ids = [
            known[sequence.request_id].tokens[row.start + row.kept - row.num_tokens + 1 :][: row.num_tokens]
            for sequence, row in zip(plan.sequences, rows, strict=True)
        ]
        seconds = self._drawn.seconds(plan)
        ends_first = self._spoil(plan, ids)
        result = StepResult(ids, drafts=[row.num_drafts for row in rows], prompt_logprobs=_prompt_logprobs(plan))
        for later in self._scheduler.plans_to_read(plan):
            self._drafts.read(later)
        outputs = self._failures.end_rows(plan, result, partial(self._scheduler.update, plan, result, seconds))
        for output in sorted(outputs, key=lambda output: output.request_id != ends_first):
            life = self._alive[output.request_id]  # one that has ended has no more to say
            life.received += output.token_ids
            life.num_prompt_logprobs += len(output.prompt_logprobs)
            if output.finish_reason == "error":
                self._device.spoil(output.request_id, self._num_begun)
                self._bury(output.request_id)
            elif output.finish_reason is not None:
                life.reason = output.finish_reason
                assert output.finish_reason == ("stop" if life.received[-1] == EOS else "length")
                self._bury(output.request_id)

    def _spoil(self, plan: NextIterationPlan, ids: list[list[int]]) -> str | None:
        """Now and then, logits of a row are not finite; who ends for it before others do, as it has no token."""
        row = self._random.randrange(plan.num_rows)
        if not ids[row] or self._random.random() > 0.005:
            return None
        place = self._random.randrange(len(ids[row]))
        ids[row][place] = NO_TOKEN
        return None if place else plan.sequences[row].request_id

    def _bury(self, request_id: str) -> None:
        life = self._alive.pop(request_id)
        self._texts.end(life.sequence)
        self._ended.append(life)
        self._turns.end(life.sequence)

    def _check(self) -> None:
        self._adapters.forget()
        self._scheduler.check_integrity()
        self._texts.check(self._scheduler.memory.earlier, [life.sequence for life in self._alive.values()])
        pages = self._drawn.pages
        assert pages.num_free + pages.num_cached + pages.num_owned == pages.num_total, "a page is lost"
        assert self._drawn.slots.num_owned <= MOST_STATES + self._drawn.max_num_seqs, "a slot is lost"
        assert self._scheduler.num_running + self._scheduler.num_waiting == len(self._alive), "a sequence is lost"


def _prompt_logprobs(plan: NextIterationPlan) -> dict[int, tuple[int, list[TokenLogprobs]]]:
    """Of each row that is asked for some, those of the prompt's tokens behind its own."""
    asked = prompt_logprobs_of(plan) if plan.samples_of is None else []
    return {one.row: (one.first, [TokenLogprobs([], [], [])] * one.count) for one in asked}
