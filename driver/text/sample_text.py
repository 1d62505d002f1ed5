"""One sample as its client sees it: its text, its log-probabilities and its end."""

from collections.abc import Sequence

from driver.request import Logprob
from driver.text.detokenizer import REPLACEMENT, Detokenizer
from driver.text.stops import RepetitionDetector, StopStrings
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import SequenceOutput, TokenLogprobs


class SampleText:
    """Detokenises, and looks for stop strings and repetition that are complete with token ``min_tokens`` or later."""

    def __init__(self, params: SamplingParams, prompt_tail: list[int], tokenizer: HuggingFaceTokenizer) -> None:
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
        self.stop_reason: int | str | None = None
        """The stop string, or the id of ``stop_token_ids``, that ended the output (vLLM's name)."""

    def read(self, output: SequenceOutput) -> tuple[str, int, str | None]:
        """The text to show, the number of tokens read, and the finish reason if there is one.

        It reads up to the token that completes a stop string, or a repetition before the sequence
        ends, however the tokens are divided into outputs. A token that ends the sequence with
        "stop" counts, but is shown only with ``include_stop_str_in_output``.
        """
        text, tokens = "", output.token_ids
        hides_end = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        for num_read, token_id in enumerate(tokens, start=1):
            self._num_tokens += 1
            is_end = output.finish_reason is not None and num_read == len(tokens)
            if not (is_end and hides_end):
                text += self._show([token_id])
            if self._stops.matched:
                self.stop_reason = self._stops.matched
                return text, num_read, "stop"
            looped = self._loops is not None and self._loops.add(token_id)
            if looped and not is_end and self._num_tokens >= self._params.min_tokens:
                return text + self._rest(), num_read, "repetition"
        if output.finish_reason is None:
            return text, len(tokens), None
        text += self._rest()
        self.stop_reason = self._stops.matched
        if self.stop_reason is None and output.finish_reason == "stop" and tokens:
            self.stop_reason = tokens[-1] if tokens[-1] in self._params.stop_token_ids else None
        return text, len(tokens), "stop" if self._stops.matched else output.finish_reason

    def _show(self, token_ids: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.add(token_ids)
        return self._stops.add(piece, may_end=self._num_tokens >= self._params.min_tokens)

    def _rest(self) -> str:
        """The text that was held back."""
        may_end = self._num_tokens >= self._params.min_tokens
        rest = "" if self._detokenizer is None else self._stops.add(self._detokenizer.flush(), may_end=may_end)
        return rest + self._stops.flush()


class SampleLogprobs:
    """The log-probabilities of one sample, as vLLM shapes them."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._first_is_due = index == 0 and params.prompt_logprobs is not None
        """Whether the None of the prompt's first token is still to come."""

    def of_output(self, tokens: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
        """For each token a dictionary by token id, its own first."""
        return [self._named(token) for token in tokens]

    def of_prompt(self, tokens: Sequence[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        """The same for new tokens of the prompt; None for the first."""
        first: list[dict[int, Logprob] | None] = [None] if self._first_is_due else []
        self._first_is_due = False
        return first + [self._named(token) for token in tokens]

    def _named(self, token: TokenLogprobs) -> dict[int, Logprob]:
        named: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(token.token_ids, token.logprobs, token.ranks, strict=True):
            if token_id not in named:
                named[token_id] = Logprob(logprob, rank, *self._spelt(token_id))
        return named

    def _spelt(self, token_id: int) -> tuple[str | None, bytes | None]:
        """Its text, and its bytes where they are no text: a part of a character."""
        if self._tokenizer is None:
            return None, None
        text = self._tokenizer.text_of(token_id)
        return text, self._tokenizer.bytes_of(token_id) if REPLACEMENT in text else None
