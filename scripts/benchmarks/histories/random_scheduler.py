"""A scheduler of random sizes, for its model checker, and what its plans may hold."""

from collections.abc import Mapping
from random import Random

from caching.cache_groups import CacheGroups
from caching.host_tier import HostTier
from caching.page_manager import HBMPageManager
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.estimates.prompt_room import LEAST_SHARE, TIMES
from engine.scheduling.estimates.step_costs import StepCosts
from engine.scheduling.host_cache.copy_cost import CopyCost
from engine.scheduling.plan import NextIterationPlan
from engine.scheduling.prefixes.earlier_texts import EarlierTexts
from engine.scheduling.prefixes.sequence_states import SequenceStates
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence_memory import SequenceMemory
from engine.scheduling.speculation import Speculation
from scripts.benchmarks.histories.life import Life
from scripts.benchmarks.histories.simulated_drafts import SimulatedDrafts
from scripts.benchmarks.histories.simulated_texts import SimulatedTexts
from scripts.benchmarks.histories.turns import MOST_SEQUENCES, WEIGHTS

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 4), (None, 6, 6), (3,), (None, None, 1), (2, 9))
"""What groups of layers keep of a sequence, in tokens; None is all."""
MOST_STATES = 8
"""Slots beyond those of running sequences, in which states may be kept."""


class RandomScheduler:
    """``scheduler``, what it was made of, and what it is told that steps take."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.has_states = random.random() > 0.5
        windows = random.choice((*WINDOWS, ())) if self.has_states else random.choice(WINDOWS)
        self.page_size = random.randint(1, 5)
        has_host = bool(windows) and random.random() > 0.4
        num_pages = random.randint(10, 14 if has_host else 40) * max(1, len(windows))
        self.has_state_host = self.has_states and has_host and random.random() > 0.2
        slots = random.randint(1, random.choice((6, 2 * num_pages))) * (1 + 2 * self.has_state_host)
        tier = HostTier(slots, random.choice((1, 2, 8))) if has_host else None
        self.pages = HBMPageManager(num_pages, tier)
        self.cost = CopyCost(random.random(), 1, random.choice((0, random.random())))
        max_num_seqs = random.randint(1, MOST_SEQUENCES)
        kept, state_tier = random.randint(0, MOST_STATES), None
        if self.has_state_host:
            kept = random.choice((0, 1, 1, 2))
            state_tier = HostTier(random.choice((1, MOST_STATES, 4 * MOST_STATES)), random.choice((1, 2, 8)))
        self.slots = HBMPageManager(1 + max_num_seqs + kept, state_tier)
        states = SequenceStates(self.slots, self.page_size, max_num_seqs) if self.has_states else None
        self.max_num_seqs = max_num_seqs
        self._budget = max_num_seqs + random.randint(0, 12)
        self.groups = CacheGroups(self.page_size, windows, self._budget)
        self.run_ahead = random.randint(0, 3)
        self.fair = random.random() < 0.8
        long = random.choice((None, 1, 3, self._budget))
        self._timed = random.random() < 0.5
        """Whether the scheduler is told what steps take: then a prompt is long beside what time leaves of a step."""
        self._target = random.choice((None, None, random.random()))
        self._fixed, self._per_token = random.random(), random.choice((0.0, 0.01, 0.1, random.random()))
        """Seconds of a step, most of the time."""
        self.long = long or (1 if self._timed else max(1, self._budget // 2))
        self.num_adapter_slots = random.choice((0, 1, 2, 3))
        self.drafts = SimulatedDrafts(random, random.choice((0, 0, 1, 3, 6)))
        self.texts = SimulatedTexts(random)
        sizes = sorted({self._budget, *random.choices(range(1, self._budget + 1), k=4)})
        costs = StepCosts(sizes)
        self.scheduler = InferenceScheduler(
            SequenceMemory(self.pages, self.groups, states, self.cost, EarlierTexts(self.texts.num_tokens)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._budget,
            long_prefill_token_threshold=long,
            priority_preemption_threshold=random.randint(1, 12),
            client_weights=WEIGHTS,
            reserve=GrowthReserve(self.pages.num_total, least=random.choice((0.0, 0.1, 1.0))),
            fair=self.fair,
            adapters=AdapterSlots(self.num_adapter_slots),
            speculation=self._speculation(costs, sizes),
            step_costs=costs,
            inter_token_seconds=self._target,
        )

    def _speculation(self, costs: StepCosts, sizes: list[int]) -> Speculation | None:
        """Drafts are granted as costs say, or whatever they cost."""
        most, has_model = self.drafts.most, self.drafts.has_model
        if not most:
            return None
        if self._random.random() < 0.5:
            return Speculation(most, has_model=has_model)
        return Speculation(most, costs.seconds, sizes, has_model=has_model)

    def seconds(self, plan: NextIterationPlan) -> float | None:
        """What the step of a plan takes; None if the scheduler is not told."""
        seconds = (self._fixed + self._per_token * (plan.num_tokens + plan.num_passes)) * self._random.choice(
            (1, 1, 1, 1.2, 0.8, 10, 1e-6, 1000)
        )
        return seconds if self._timed else None

    def check(self, plan: NextIterationPlan, alive: Mapping[str, Life]) -> None:
        """Assert that a plan is within what the scheduler was told, for those that have not ended."""
        assert 0 < plan.num_tokens == sum(plan.counts) <= self._budget, "a step has more tokens than it may"
        assert len(set(map(id, plan.sequences))) == plan.num_rows <= self.max_num_seqs, "a sequence has two rows"
        assert plan.logits[: plan.num_decodes] == plan.counts[: plan.num_decodes], "a decoding row samples too little"
        assert max(plan.counts[: plan.num_decodes], default=1) <= 1 + self.drafts.most, "a row has too many drafts"
        assert sum(plan.samples) <= max(self.max_num_seqs, 1 + self.drafts.most), "a step samples too much"
        self._check_seconds(plan, alive)
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            assert sequence.request_id in alive, "a sequence that has ended is planned"
            assert start + count <= sequence.num_paged_tokens, "a token has no page"
            for group in self.groups.windowed:
                owned = len(sequence.pages[group]) - sequence.first_pages[group]
                assert owned <= self.groups.most[group], "a window holds pages that nobody will read"

    def _check_seconds(self, plan: NextIterationPlan, alive: Mapping[str, Life]) -> None:
        """Beside decodes, prompts get no more than keeps the step below the target, as far as is known, or their least."""
        costs, prompts = self.scheduler.step_costs, plan.num_tokens - plan.num_decode_tokens
        late = [life for life in alive.values() if life.sequence.awaits_sample]
        decodes = plan.num_decode_tokens + sum(life.sequence not in plan.sequences for life in late)
        passes = plan.num_passes
        alone, cost = costs.seconds(min(decodes, self._budget), passes), costs.seconds(plan.num_tokens)
        if decodes and alone is not None and prompts > max(1, self._budget // LEAST_SHARE):
            target = TIMES * alone if self._target is None else self._target
            drafting = costs.drafting_seconds(passes)
            assert cost is not None and drafting is not None, "nobody knows what a step costs"
            assert cost <= target - drafting, "those who decode wait for prompts"
