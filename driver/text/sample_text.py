"""What a client gets of one sample: its text, its log-probabilities, and whether the text ends it."""

from driver.request import Logprob
from driver.text.detokenizer import Detokenizer
from driver.text.stops import RepetitionDetector, StopStrings
from driver.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import SequenceOutput, TokenLogprobs


class SampleText:
    """Detokenises, and looks for stop strings and loops, from token ``min_tokens`` on."""

    def __init__(self, params: SamplingParams, prompt_tail: list[int], tokenizer: Tokenizer) -> None:
        self._params = params
        self._num_tokens = 0
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_tail,
                special=not params.skip_special_tokens,
                spaces=params.spaces_between_special_tokens,
            )
        self._stops = StopStrings(params.stops, include=params.include_stop_str_in_output)
        loops = params.repetition_detection
        self._loops = None if loops is None else RepetitionDetector(loops)

    def read(self, output: SequenceOutput) -> tuple[str, int, str | None]:
        """The text to show, the tokens it took, up to the one that completes a stop, and the reason if it ends there.

        A token that ends the sequence with "stop" is a word to us, not to the reader: it counts, but is not shown
        unless ``include_stop_str_in_output``.
        """
        text, tokens = "", output.token_ids
        hides_last = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        for num_read, token_id in enumerate(tokens, start=1):
            self._num_tokens += 1
            if not (hides_last and num_read == len(tokens)):
                text += self._show([token_id])
            if self._stops.matched:
                return text, num_read, "stop"
            looped = self._loops is not None and self._loops.add(token_id)
            if looped and output.finish_reason is None and self._num_tokens >= self._params.min_tokens:
                return text + self._rest(), num_read, "repetition"
        if output.finish_reason is None:
            return text, len(tokens), None
        text += self._rest()
        return text, len(tokens), "stop" if self._stops.matched else output.finish_reason

    def _show(self, token_ids: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.add(token_ids)
        return self._stops.add(piece) if self._num_tokens >= self._params.min_tokens else piece

    def _rest(self) -> str:
        """What was held back."""
        rest = "" if self._detokenizer is None else self._stops.add(self._detokenizer.flush())
        return rest + self._stops.flush()


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
