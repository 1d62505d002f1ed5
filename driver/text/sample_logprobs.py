"""Log-probabilities in the shape that clients know from vLLM."""

from driver.request import Logprob
from driver.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import TokenLogprobs


class SampleLogprobs:
    """Those of one sample; those of its prompt go with the first sample of a request alone."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._owes_first = index == 0 and params.prompt_logprobs is not None
        """Whether the prompt's first token, which has none, is still to be told of."""

    def of_output(self, tokens: list[TokenLogprobs]) -> list[dict[int, Logprob]]:
        """By token id, the token's own first."""
        return [self._named(token) for token in tokens]

    def of_prompt(self, tokens: list[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        """What is new; None for the first token."""
        first: list[dict[int, Logprob] | None] = [None] if self._owes_first else []
        self._owes_first = False
        return first + [self._named(token) for token in tokens]

    def _named(self, token: TokenLogprobs) -> dict[int, Logprob]:
        named: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token.token_ids, token.logprobs, token.ranks, strict=True):
            if token_id not in named:
                named[token_id] = Logprob(logprob, rank, self._text(token_id))
        return named

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
