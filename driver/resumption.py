"""Resuming outputs of an earlier request that was interrupted."""

import msgspec

from driver.errors import InvalidRequest
from driver.text.sample_text import SampleText
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput


class Resumed(msgspec.Struct, frozen=True):
    """A resumed sample: the client's output, its text, and what ``read`` returned for it."""

    output: SequenceOutput
    text: SampleText
    read: tuple[str, int, str | None]


def read_again(
    outputs: list[SequenceOutput], params: SamplingParams, prompt_tail: list[int], tokenizer: HuggingFaceTokenizer
) -> list[Resumed]:
    """Reads the outputs that are not empty as text; they may have a million tokens."""
    resumed = []
    for output in outputs:
        if output.token_ids:
            text = SampleText(params, prompt_tail, tokenizer)
            resumed.append(Resumed(output, text, text.read(output)))
    return resumed


def resume(sequences: list[Sequence], resume_token_ids: list[list[int]]) -> list[SequenceOutput]:
    """Gives each sequence the output that the client has, and returns these, with a finish reason
    where one is complete.

    The token ids are in the vocabulary. Raises InvalidRequest where they cannot begin an output.
    """
    if resume_token_ids and len(resume_token_ids) != len(sequences):
        raise InvalidRequest(
            f"resume_token_ids must have a list for each of the {len(sequences)} samples (n), not {len(resume_token_ids)}"
        )
    return [
        _resumed(f"resume_token_ids[{index}]", sequence, token_ids)
        for index, (sequence, token_ids) in enumerate(zip(sequences, resume_token_ids, strict=False))
    ]


def _resumed(name: str, sequence: Sequence, token_ids: list[int]) -> SequenceOutput:
    if len(token_ids) > sequence.max_tokens:
        raise InvalidRequest(f"{name} has {len(token_ids)} tokens, but max_tokens is {sequence.max_tokens}")
    if not sequence.stop_token_ids.isdisjoint(token_ids[:-1]):
        raise InvalidRequest(f"{name} goes on behind a token that ends the output")
    sequence.output_token_ids = list(token_ids)
    reason = None
    if token_ids and token_ids[-1] in sequence.stop_token_ids:
        reason = "stop"
    elif len(token_ids) == sequence.max_tokens:
        reason = "length"
    return SequenceOutput(sequence.request_id, token_ids, reason)
