"""All that a step is, for whichever process executes it: integers and rows of numbers, and nothing of its sequences."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.sampling.logit_bias import LogitBias, bias_of
from engine.sampling.penalties import Penalties, penalties_of
from engine.sampling.sampler import SamplingVariant
from engine.sampling.sampling_metadata import ModelRunnerSamplingMetadata, Need, PromptLogprobs
from engine.sampling.token_masks import pack_masks
from engine.scheduling.plan import NextIterationPlan
from engine.step.execution_manager import PROMPT_BLOCK
from engine.step.model_io import StepLayout


class StepDescription(msgspec.Struct, frozen=True, tag="step"):
    """A step of the bucket of ``tokens`` tokens. Executed in the same order, it gives the same everywhere."""

    tokens: int
    packed: Any
    """i32[layout.size] (engine/step/model_io.py)."""
    variant: SamplingVariant
    needs: Need
    bias: list[tuple[int, LogitBias]]
    """Slots and the rows to be written for them."""
    penalties: list[tuple[int, Penalties]]
    """The same."""
    masks: Any = None
    """i32[rows, words] of ``pack_masks``, where a row has a constraint."""
    prompt_tokens: Any = None
    """i32[blocks, 2, PROMPT_BLOCK]: places in the flat batch, and the tokens after them whose log-probabilities are asked."""


def describe_step(
    plan: NextIterationPlan,
    layout: StepLayout,
    packed: NDArray[np.int32],
    metadata: ModelRunnerSamplingMetadata,
    vocab_size: int,
) -> StepDescription:
    """What is to be executed of a plan, for logits of so many columns; ``packed`` and ``metadata`` are ModelIOProcessor's."""
    return StepDescription(
        layout.tokens,
        packed,
        metadata.variant,
        metadata.needs,
        [(sequence.slot, bias_of(sequence, vocab_size)) for sequence in metadata.to_bias],
        [(sequence.slot, penalties_of(sequence, vocab_size)) for sequence in metadata.to_penalize],
        pack_masks(plan, layout.rows, vocab_size) if plan.constrained else None,
        _prompt_tokens(plan, metadata.prompt_logprobs) if metadata.prompt_logprobs else None,
    )


def _prompt_tokens(plan: NextIterationPlan, asked: list[PromptLogprobs]) -> NDArray[np.int32]:
    """A block of places after the other; what is left of the last block is for nobody."""
    places = np.concatenate([np.arange(one.start, one.start + one.count) for one in asked])
    targets = np.concatenate(
        [plan.sequences[one.row].prompt_token_ids[one.first : one.first + one.count] for one in asked]
    )
    flat = np.zeros((2, -(-len(places) // PROMPT_BLOCK) * PROMPT_BLOCK), np.int32)
    flat[:, : len(places)] = places, targets
    return np.ascontiguousarray(flat.reshape(2, -1, PROMPT_BLOCK).swapaxes(0, 1))
