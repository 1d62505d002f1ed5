"""The parts of the sampler that the rows of a step need; a step computes no others."""

from enum import IntFlag

from engine.sampling.logit_bias import needs_bias
from engine.sampling.penalties import needs_penalties
from engine.scheduling.sequence import Sequence


class Need(IntFlag):
    """A sequence's needs beyond argmax; a step has those of all rows that sample."""

    DRAW = 1
    BIAS = 2
    PENALTIES = 4
    LOGPROBS = 8
    PROMPT_LOGPROBS = 16
    """Applies to rows that do not sample, too."""


SAMPLERS = int(~Need.PROMPT_LOGPROBS)
"""Those of the samplers; an int, as numpy takes a flag for an object of any kind."""


def needs_of(sequence: Sequence) -> Need:
    """The needs of a sequence, the same for all of its tokens."""
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
