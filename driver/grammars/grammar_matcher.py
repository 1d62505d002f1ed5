"""Grammars as llguidance compiles and follows them, inside of a worker's process."""

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from driver.grammars.grammar_protocol import GrammarJob, TokenizerDefinition

MAX_ERROR = 500
"""Characters of llguidance's words to pass on: they quote lines of the grammar, which may be long."""
NO_TOKEN = "no token of this model can come next"


class GrammarError(Exception):
    """The grammar cannot be compiled, or followed any further; the message is for the client."""


class Vocabulary:
    """The tokenizer, and masks as the daemon wants them: i32 words of 32 tokens each, lowest bit first."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        vocab_size, eos = definition.vocab_size, list(definition.eos_token_ids)
        # Of a model without an end, the tokenizer's is never shown.
        self.tokenizer = LLTokenizer(definition.tokenizer, n_vocab=vocab_size, eos_token=eos or None)
        self._bytes = -(-vocab_size // 32) * 4
        self._going_on = (1 << vocab_size) - 1 & ~sum(1 << token_id for token_id in {*self.tokenizer.eos_tokens})
        self._known = (1 << vocab_size) - 1 if eos else self._going_on

    def mask_of(self, matcher: LLMatcher, *, hide_eos: bool) -> tuple[bytes, bool]:
        """The tokens that may be next, and whether one of them goes on with the text."""
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & self._known
        _check(matcher)
        going_on = mask & self._going_on
        shown = going_on if hide_eos and going_on else mask
        return shown.to_bytes(self._bytes, "little"), bool(going_on)


class Grammar:
    """A compiled grammar, from which matchers begin. Takes an encoded GrammarJob; raises GrammarError."""

    def __init__(self, vocabulary: Vocabulary, encoded: bytes) -> None:
        job = msgspec.msgpack.decode(encoded, type=GrammarJob)
        limits = LLParserLimits(verbose_errors=False)
        try:
            self._start = LLMatcher(vocabulary.tokenizer, _definition(job), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        _check(self._start)
        self._vocabulary = vocabulary
        self._hide_eos = job.hide_eos
        self.first_mask, _ = vocabulary.mask_of(self._start, hide_eos=job.hide_eos)
        """The tokens that a text may begin with."""
        if not any(self.first_mask):
            raise GrammarError("it allows no text but the empty one")

    def begin(self) -> "Matcher":
        """One at the start."""
        return Matcher(self._vocabulary, self._start.deep_copy(), hide_eos=self._hide_eos)


class Matcher:
    """How far into a grammar a sequence is."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, *, hide_eos: bool) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._hide_eos = hide_eos

    def advance(self, token_ids: list[int]) -> bytes | None:
        """The mask after more tokens; None where the text is complete and nothing but its end may follow."""
        self._matcher.consume_tokens(token_ids)
        _check(self._matcher)
        if self._matcher.is_stopped():
            return None
        mask, goes_on = self._vocabulary.mask_of(self._matcher, hide_eos=self._hide_eos)
        if not goes_on and not self._matcher.is_accepting():
            raise GrammarError(NO_TOKEN)
        return mask if goes_on else None


def _definition(job: GrammarJob) -> str:
    if job.kind == "json":
        return LLMatcher.grammar_from_json_schema(job.source, overrides=job.options)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(job.source) if job.kind == "regex" else LLMatcher.grammar_from_lark(job.source)


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    raise GrammarError(NO_TOKEN if error == "NoExtensionBias" else error[:MAX_ERROR])
