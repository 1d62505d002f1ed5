"""Resuming outputs of an earlier request that was interrupted."""

from collections.abc import Callable

import msgspec

from driver.errors import InvalidRequest
from driver.text.sample_text import SampleText
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.request_limits import MAX_RESUMED_TOKENS
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput

READ_AT_ONCE = 4096
"""Tokens that are read before the next look whether the request was aborted: a tenth of a second."""


class Resumed(msgspec.Struct, frozen=True):
    """A resumed sample: the client's output, its text, and what ``read`` returned for it."""

    output: SequenceOutput
    text: SampleText
    read: tuple[str, int, str | None]


def read_again(
    outputs: list[SequenceOutput],
    params: SamplingParams,
    prompt_tail: list[int],
    tokenizer: HuggingFaceTokenizer,
    aborted: Callable[[], bool],
) -> list[Resumed] | None:
    """Reads the outputs that are not empty as text; None once the request is aborted.

    They may have half a million tokens, which take half a minute. A timeout of the request waits
    for that: it ends all samples, and they are known when they have been read.
    """
    resumed = []
    for output in outputs:
        if output.token_ids:
            text = SampleText(params, prompt_tail, tokenizer)
            read = _read(output, text, aborted)
            if read is None:
                return None
            resumed.append(Resumed(output, text, read))
    return resumed


def _read(output: SequenceOutput, text: SampleText, aborted: Callable[[], bool]) -> tuple[str, int, str | None] | None:
    """As ``text.read(output)``, a part after the other."""
    pieces, num_read = [], 0
    while not aborted():
        part = output.token_ids[num_read : num_read + READ_AT_ONCE]
        is_last = num_read + len(part) == len(output.token_ids)
        reason = output.finish_reason if is_last else None
        piece, count, reason = text.read(SequenceOutput(output.request_id, part, reason))
        pieces.append(piece)
        num_read += count
        if is_last or reason is not None:
            return "".join(pieces), num_read, reason
    return None


def resume(sequences: list[Sequence], resume_token_ids: list[list[int]]) -> list[SequenceOutput]:
    """Gives each sequence the output that the client has, and returns these, with a finish reason
    where one is complete.

    The token ids are in the vocabulary. Raises InvalidRequest where they cannot begin an output.
    """
    num_tokens = sum(map(len, resume_token_ids))
    if num_tokens > MAX_RESUMED_TOKENS:
        raise InvalidRequest(
            f"resume_token_ids have {num_tokens} tokens, and may have {MAX_RESUMED_TOKENS}, all samples together"
        )
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
