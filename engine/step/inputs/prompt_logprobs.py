"""The prompt tokens of a step whose log-probabilities are asked for, in blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.plan import NextIterationPlan

PROMPT_BLOCK = 64
"""Prompt tokens per block of log-probabilities: their logits fit in a step's memory anyway."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Prompt tokens ``first .. first + count - 1`` of a row, whose logprobs a step computes."""

    row: int
    first: int
    count: int
    start: int
    """Flat-batch index of the token before ``first``."""


def prompt_logprobs_of(plan: NextIterationPlan) -> list[PromptLogprobs]:
    """For each row that wants some. The previous token's logits give a token's logprobs."""
    asked, at = [], plan.num_decode_tokens
    for row in range(plan.num_decodes, plan.num_rows):
        sequence, start, count = plan.sequences[row], plan.starts[row], plan.counts[row]
        last = min(start + count, len(sequence.prompt_token_ids) - 1)
        if sequence.params.prompt_logprobs is not None and last > start:
            asked.append(PromptLogprobs(row, start + 1, last - start, at))
        at += count
    return asked


def prompt_tokens(plan: NextIterationPlan, asked: list[PromptLogprobs]) -> NDArray[np.int32]:
    """i32[blocks, 3, PROMPT_BLOCK] of indices, targets and adapters' slots; the last block is
    padded."""
    places = np.concatenate([np.arange(one.start, one.start + one.count) for one in asked])
    targets = np.concatenate(
        [plan.sequences[one.row].prompt_token_ids[one.first : one.first + one.count] for one in asked]
    )
    slots = np.repeat([plan.sequences[one.row].adapter_slot for one in asked], [one.count for one in asked])
    flat = np.zeros((3, -(-len(places) // PROMPT_BLOCK) * PROMPT_BLOCK), np.int32)
    flat[:, : len(places)] = places, targets, slots
    return np.ascontiguousarray(flat.reshape(3, -1, PROMPT_BLOCK).swapaxes(0, 1))
