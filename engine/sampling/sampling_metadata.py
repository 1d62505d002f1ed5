"""What the rows of a step need of the sampler, so that a step computes that and no more."""

from dataclasses import dataclass, field
from enum import IntFlag

from engine.sampling.logit_bias import needs_bias
from engine.sampling.penalties import needs_penalties
from engine.sampling.sampler import SamplingVariant
from engine.scheduling.sequence import Sequence


class Need(IntFlag):
    """What one sequence needs beyond the likeliest token; a step needs what any of its rows that sample does."""

    DRAW = 1
    TRUNCATION = 2
    BIAS = 4
    PENALTIES = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    """The one that rows need whether they sample or not."""


@dataclass(frozen=True)
class PromptLogprobs:
    """One row's prompt tokens whose log-probabilities a step gives: prompt tokens ``first .. first + count - 1``."""

    row: int
    first: int
    count: int
    start: int
    """Where in the step's flat batch the token before ``first`` is."""


@dataclass(frozen=True)
class ModelRunnerSamplingMetadata:
    """What a step is to be sampled with, from SequenceBuffer's rows."""

    needs: Need
    to_bias: list[Sequence] = field(default_factory=list)
    """Sequences that have just been given a slot, where a row of LogitBias is to be written."""
    to_penalize: list[Sequence] = field(default_factory=list)
    """The same for Penalties."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def variant(self) -> SamplingVariant:
        """The cheapest that serves all rows."""
        if not self.needs & Need.DRAW:
            return SamplingVariant.GREEDY
        return SamplingVariant.TRUNCATED if self.needs & Need.TRUNCATION else SamplingVariant.TEMPERATURE


def needs_of(sequence: Sequence) -> Need:
    """What a sequence needs from its first token to its last."""
    params, needs = sequence.params, Need(0)
    if params.temperature > 0:
        needs |= Need.DRAW
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            needs |= Need.TRUNCATION
    if needs_bias(sequence):
        needs |= Need.BIAS
    if needs_penalties(sequence):
        needs |= Need.PENALTIES
    if params.logprobs is not None:
        needs |= Need.LOGPROBS
    if params.prompt_logprobs is not None:
        needs |= Need.PROMPT_LOGPROBS
    return needs
