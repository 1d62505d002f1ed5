"""What the rows of a step need of the sampler, so that a step computes that and no more."""

from enum import IntFlag

from engine.sampling.logit_bias import needs_bias
from engine.sampling.penalties import needs_penalties
from engine.scheduling.sequence import Sequence


class Need(IntFlag):
    """What one sequence needs beyond the likeliest token; a step needs what any of its rows that sample does."""

    DRAW = 1
    BIAS = 2
    PENALTIES = 4
    LOGPROBS = 8
    PROMPT_LOGPROBS = 16
    """The one that rows need whether they sample or not."""


def needs_of(sequence: Sequence) -> Need:
    """What a sequence needs from its first token to its last."""
    params, needs = sequence.params, Need(0)
    if params.temperature > 0:
        needs |= Need.DRAW
    if needs_bias(sequence):
        needs |= Need.BIAS
    if needs_penalties(sequence):
        needs |= Need.PENALTIES
    if params.logprobs is not None:
        needs |= Need.LOGPROBS
    if params.prompt_logprobs is not None:
        needs |= Need.PROMPT_LOGPROBS
    return needs
