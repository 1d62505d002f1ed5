"""The scheduler as we ship it, and without one policy at a time."""

from dataclasses import dataclass

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.scheduling.estimates.growth_reserve import GrowthReserve
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence_memory import SequenceMemory

PAGE_SIZE, MAX_NUM_SEQS, BUDGET = 16, 512, 4096


@dataclass(frozen=True)
class Policy:
    """Which of the policies are in force."""

    name: str
    reserve: bool = True
    """Pages are kept free at admission, for those who run to grow into."""
    cap: bool = True
    """Long prompts get a part of a step."""
    fair: bool = True
    """It is the turn of the client that has had least; otherwise, of who came first."""
    timed: bool = True
    """Steps with decoding rows are bounded in time."""

    def scheduler(self, num_pages: int) -> InferenceScheduler:
        """A scheduler with a pool of its own."""
        pages = HBMPageManager(num_pages)
        return InferenceScheduler(
            SequenceMemory(pages, CacheGroups(PAGE_SIZE)),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            long_prefill_token_threshold=None if self.cap else BUDGET,
            reserve=None if self.reserve else GrowthReserve(pages.num_total, watermark=0, least=0),
            fair=self.fair,
        )


SHIPPED = Policy("as shipped")
POLICIES = (
    SHIPPED,
    Policy("no watermark", reserve=False),
    Policy("no chunk cap", cap=False),
    Policy("FIFO", fair=False),
    Policy("steps of any length", timed=False),
)
