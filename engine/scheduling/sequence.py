"""One Sequence lives from admission to finish; preempted, it is WAITING again, never copied."""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from caching.page_manager import SINK_SLOT, Found
from caching.prefix_cache import page_keys
from engine.sampling_params import SamplingParams
from engine.scheduling.constraints.token_constraint import TokenConstraint
from engine.scheduling.estimates.draft_runs import DraftRuns
from engine.scheduling.estimates.recent_share import RecentShare
from engine.scheduling.rows.draft_rest import DraftRest

NO_DRAFT = -1
"""Instead of a token id: there is no draft, or an earlier text has ended."""
EXPECTED_DRAFT_ACCEPTANCE = 0.6
"""Of the drafts of a sequence that has had none."""


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """Token ids of one request and what the scheduler knows of them.

    Built by prepare inputs; from ``Admit`` on the execution thread is its only reader and writer.
    ``stop_token_ids`` are the ids that end it with reason "stop" (the model's EOS ids, unless
    ignored, and the request's own). ``max_tokens`` is resolved: at least 1, and prompt plus
    ``max_tokens`` fits the context.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_tokens: int
    seed: int
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens that may not follow each other, of ``params.bad_words``."""
    client: str = ""
    """The client of the request: the scheduler is fair between clients."""
    user: str = ""
    """Of that client: its users take turns."""
    salt: bytes | None = b""
    """Sequences of one salt share pages of a common prefix; without a salt it shares none."""
    adapter_id: int = 0
    """The ``uid`` of its adapter; 0 is the model alone. Sequences of different adapters have
    different salts."""
    constraint: TokenConstraint | None = None
    """What its output has to follow. It has a mask whenever ``awaits_mask`` is false and
    nothing is in flight."""
    ignored_token_ids: frozenset[int] = frozenset()
    """The model's EOS ids that do not end it: before ``params.min_tokens`` it has none of them
    either, as in vLLM."""

    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in pages, or will be once the steps in flight have run, if
    all of their drafts are right."""
    num_prefill_tokens: int = 0
    """Tokens that were known when it last got a slot; below them it computes chunks, from there
    on it decodes."""
    num_in_flight: int = 0
    """Tokens being sampled on the device that have not landed in ``output_token_ids``: the most
    that there may be, where there are drafts among them.

    A preempted sequence may have some: it is not admitted again before they have landed.
    """
    earlier: ListOf[int] = ()
    """Texts of earlier sequences, NO_DRAFT behind each, that drafts may be looked for in; none without
    a slot."""
    keeps_to_itself: bool = False
    """Whether nobody is to find what it has computed, as all was forgotten since it got its pages."""
    began_after: int | None = None
    """How often texts had been forgotten when it first got a slot."""
    num_drafts: int = 0
    """Drafts that the device had for the tokens behind those that landed last; 0 with a constraint."""
    has_earlier_drafts: bool = False
    """Whether these are of earlier texts."""
    expected: ListOf[int] = ()
    """Tokens that its constraint expects behind those that have landed: drafts, if they are right."""
    num_forced: int = 0
    """Of these, those that its constraint forces; the others, behind them, are guesses."""
    draft_runs: DraftRuns = field(default_factory=lambda: DraftRuns(EXPECTED_DRAFT_ACCEPTANCE))
    """How far drafts were right: those that its constraint forces or guesses do not count."""
    forced_acceptance: RecentShare = field(default_factory=lambda: RecentShare(EXPECTED_DRAFT_ACCEPTANCE))
    """How often a token that its constraint forces was right behind others that were."""
    draft_rest: DraftRest = field(default_factory=DraftRest)
    """When its drafts are thought of again."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have landed; the first has none and counts."""
    awaits_mask: bool = False
    """Whether the constraint has not answered yet to the last token that landed."""
    awaits_sample: bool = False
    """Whether the logits of its last token are kept, or will be, until the constraint answers: it
    has a token in flight that no step samples yet."""
    scheduled_at: float | None = None
    """When a step was first planned with it, in seconds of ``time.monotonic``."""
    num_cached_tokens: int = 0
    """Tokens that were found in the prefix cache then."""
    num_host_tokens: int = 0
    """Those of them that only the host's memory had."""
    slot: int = -1
    adapter_slot: int = -1
    """The slot of its adapter while it runs; -1 if it has none."""
    pages: list[list[int]] = field(default_factory=list)
    """By cache group, the page of each page of tokens; the sink where a window has passed."""
    first_pages: list[int] = field(default_factory=list)
    """By cache group, the first of ``pages`` that it owns."""
    state_source: int = SINK_SLOT
    """Slot of the recurrent state behind its computed tokens; the sink where it has none."""
    state_slot: int = SINK_SLOT
    """Slot that its next step writes that state to."""
    passed_states: list[tuple[int, int]] = field(default_factory=list)
    """Tokens and slots of the states that are kept of it and cannot be found yet; 0 tokens if they
    never will be."""
    last_state: bytes | None = None
    """The key of the last state that was kept of it, unless others branched off there."""
    branch: int = 0
    """Tokens of its known pages when it was admitted, if no state was known there."""
    num_loading: int = 0
    """Pages of its prefix hit, and its state, that are on their way from the host; until then it
    computes nothing."""
    num_known_pages: int = 0
    """About the longest prefix hit in pages, those in host memory included, when last looked for."""
    known_chain: int = 0
    """The same without regard to recurrent states."""
    num_paged_tokens: int = 0
    """Tokens that its pages hold: it may compute so many."""
    page_keys: list[bytes] = field(default_factory=list)
    """Of its known full pages, as far as ``page_keys_to`` was asked; the prompt's come with it."""
    chains: list[Found] | tuple[()] = ()
    """By cache group that keeps all tokens, what the prefix cache had when it was last asked."""
    window_hit: tuple[int, int] = (-1, 0)
    """Pages of which a hit was looked for in groups with windows, and those of the hit."""
    num_passed: int = 0
    """Sequences that were admitted before it as it lacked pages, though it was its turn."""
    arrival: int = 0
    """Its place in the order in which sequences were added."""
    expected_growth: int = 0
    """Tokens, in each cache group, that it was expected to need pages for yet, when that was
    last computed."""
    num_charged_tokens: int = 0
    """Output tokens for which its client has been charged."""
    max_computed_tokens: int = field(init=False)
    """What ``num_computed_tokens`` reaches when the last token by length is sampled; that is
    never computed."""

    def __post_init__(self) -> None:
        self.max_computed_tokens = len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def can_be_found(self) -> bool:
        """Whether others may find pages and states that it computes."""
        return self.salt is not None and not self.keeps_to_itself

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output that has landed."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def page_keys_to(self, count: int, page_size: int) -> list[bytes]:
        """Keys of its full pages, of the first ``count`` at least, of which all tokens are
        known. It has a salt."""
        assert self.salt is not None, "a sequence without a salt shares no pages"
        keys, prompt = self.page_keys, self.prompt_token_ids
        if len(keys) < count:
            start, end = len(keys) * page_size, count * page_size
            after = self.output_token_ids[max(0, start - len(prompt)) : max(0, end - len(prompt))]
            keys += page_keys(keys[-1] if keys else self.salt, prompt[start:end] + after, page_size)
        return keys

    def take_back(self, count: int, confirmed: int) -> None:
        """The last ``count`` computed tokens are behind a wrong draft, as is all of them and of its
        states behind the first ``confirmed``."""
        self.num_computed_tokens -= count
        if count:
            self.passed_states = [(tokens if tokens <= confirmed else 0, slot) for tokens, slot in self.passed_states]

    @property
    def num_pages(self) -> int:
        """Pages that it owns, in all cache groups."""
        return sum(map(len, self.pages)) - sum(self.first_pages)

    @property
    def num_total_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_tokens + self.num_in_flight

    @property
    def prefilling(self) -> bool:
        """Whether known tokens are left to compute before it decodes."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it ever had a slot."""
        return self.num_prefill_tokens > 0

    @property
    def has_mask(self) -> bool:
        """Whether its constraint has answered to all of its tokens."""
        return not (self.num_in_flight or self.awaits_mask)

    @property
    def expected_drafts(self) -> ListOf[int]:
        """What of ``expected`` follows the tokens in flight, if all of these are as expected. Where
        its next row samples at once, its masks are known."""
        if self.constraint is not None and self.has_mask:
            return self.expected[: len(self.constraint.expected_masks)]
        return self.expected[self.num_in_flight :]

    @property
    def num_forced_drafts(self) -> int:
        """Of ``expected_drafts``, the most that are forced."""
        return max(0, self.num_forced - self.num_in_flight)

    @property
    def ends_by_length(self) -> bool:
        """Whether the tokens landed and in flight may already reach ``max_tokens``."""
        return len(self.output_token_ids) + self.num_in_flight >= self.max_tokens


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Of one position: first the token that is there, then the likeliest ones, as many as were
    asked for."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural logarithms of the model's own probabilities, before temperature, penalties, bias
    and masks."""
    ranks: list[int]
    """1 is the likeliest; a token's rank is one more than there are likelier ones."""


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one request. ``finish_reason`` is None, "stop", "length" or "error",
    which ``error`` explains.

    ``logprobs`` has an entry for each token, ``prompt_logprobs`` one for each prompt token that
    the step looked at, save the first of all; where they were not asked for they are empty. An
    error is the request's own fault, unless it is ``internal``.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: ListOf[TokenLogprobs] = ()
    prompt_logprobs: ListOf[TokenLogprobs] = ()
    error: str | None = None
    internal: bool = False
