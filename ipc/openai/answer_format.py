"""What an answer has beside its text."""

from typing import Any, NamedTuple


class AnswerFormat(NamedTuple):
    """``num_logprobs`` of the likeliest tokens are shown where log-probabilities are.

    With ``tokens_as_ids`` these call each token by its id, ``token_id:17``.
    """

    num_logprobs: int = 0
    with_token_ids: bool = False
    with_prompt_token_ids: bool = False
    tokens_as_ids: bool = False


def format_of(params: dict[str, Any]) -> AnswerFormat:
    """That of a request with these SamplingParams and no options of OpenAI's."""
    return AnswerFormat(params.get("logprobs") or 0, with_token_ids=params.get("detokenize") is False)
