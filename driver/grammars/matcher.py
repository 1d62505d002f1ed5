"""Which tokens a grammar allows behind those of a sequence, and which it expects, by llguidance.

This runs in processes of its own (driver/grammars/worker_process.py).
"""

import itertools
import time
from array import array
from collections import deque
from collections.abc import Iterator

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from driver.grammars.notation import pattern
from driver.grammars.protocol import GrammarJob, TokenizerDefinition

AHEAD_SECONDS = 0.001
"""Processor time that an answer may take to look ahead, on average: with the mask itself, if that
is as quick, it is what a token costs nothing (FREE_SECONDS of matcher_pool)."""
NO_TOKEN = "no token of this model can come next"


class GrammarError(Exception):
    """The grammar cannot be compiled, or followed any further; the message is for the client."""


class MaskedTokenizer:
    """The tokenizer, and token masks for the daemon: i32 words, lowest bit first.

    The model's vocabulary may have more ids than the tokenizer, or fewer; an id that either lacks
    is never allowed.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        vocab_size, eos = definition.vocab_size, list(definition.eos_token_ids)
        # For a model without an end of text, the tokenizer's own end is never allowed.
        self.tokenizer = LLTokenizer(definition.tokenizer, eos_token=eos or None)
        self._vocab_size = vocab_size
        self._num_bytes = -(-vocab_size // 32) * 4
        self._text = (1 << vocab_size) - 1 & ~sum(1 << token_id for token_id in {*self.tokenizer.eos_tokens})
        """The mask of every token that does not end the text."""
        self._known = (1 << vocab_size) - 1 if eos else self._text

    def mask(self, matcher: LLMatcher, *, hide_eos: bool) -> tuple[bytes, bool]:
        """The tokens that may be next, and whether one of them continues the text."""
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & self._known
        _check(matcher)
        text = allowed & self._text
        shown = text if hide_eos and text else allowed
        return shown.to_bytes(self._num_bytes, "little"), bool(text)

    def forced_tokens(self, matcher: LLMatcher) -> Iterator[int]:
        """The tokens that must be next, up to one that the model lacks."""
        forced = matcher.compute_ff_tokens()
        _check(matcher)
        return itertools.takewhile(lambda token_id: token_id < self._vocab_size, forced)

    def known(self, guess: list[int]) -> list[int]:
        """A guess up to a token that the tokenizer lacks, which llguidance takes for an error."""
        return list(itertools.takewhile(lambda token_id: token_id < self.tokenizer.vocab_size, guess))


class Grammar:
    """A compiled grammar, of an encoded GrammarJob; raises GrammarError."""

    def __init__(self, tokenizer: MaskedTokenizer, encoded: bytes) -> None:
        job = msgspec.msgpack.decode(encoded, type=GrammarJob)
        limits = LLParserLimits(verbose_errors=False)
        try:
            self._start = LLMatcher(tokenizer.tokenizer, _definition(job), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        _check(self._start)
        self._tokenizer = tokenizer
        self._hide_eos = job.hide_eos
        self.first_mask, _ = tokenizer.mask(self._start, hide_eos=job.hide_eos)
        """The tokens that a text may begin with."""
        if not any(self.first_mask):
            raise GrammarError("it allows no text but the empty one")

    def begin(self, num_drafts: int) -> "Matcher":
        """A matcher at the start of the text, which is asked for so many drafts."""
        return Matcher(self._tokenizer, self._start, num_drafts, hide_eos=self._hide_eos)


class Matcher:
    """The position of one sequence in a grammar, whose ``start`` is that before any token."""

    def __init__(self, tokenizer: MaskedTokenizer, start: LLMatcher, num_drafts: int, *, hide_eos: bool) -> None:
        self._tokenizer = tokenizer
        self._start, self._matcher = start, start.deep_copy()
        self._hide_eos = hide_eos
        self._num_drafts = num_drafts
        self._tokens = array("I")
        self._forced: deque[int] = deque()
        """Of the tokens that llguidance found to be forced, those that may be next yet."""
        self._debt = 0.0
        """Seconds of processor time that looking ahead took more than it may."""

    def advance(self, token_ids: list[int]) -> bytes | None:
        """The mask after more tokens; None where only the end of the text may follow."""
        self._tokens.extend(token_ids)
        self._matcher.consume_tokens(token_ids)
        _check(self._matcher)
        for token_id in token_ids:
            if self._forced and self._forced.popleft() != token_id:
                self._forced.clear()
        return self._mask()

    def look_ahead(self, guess: list[int]) -> tuple[list[int], int, list[bytes]]:
        """The expected tokens of a WayOn from here, how many of them are forced, and their masks.

        They are the forced ones, and as much of ``guess`` as goes on behind these and is allowed.
        Nobody depends on them, so that they take little time: AHEAD_SECONDS an answer on average. A
        grammar that fails ahead is not looked at so again: the text may end before that.
        """
        self._debt = max(0.0, self._debt - AHEAD_SECONDS)
        if not self._num_drafts or self._debt:
            return [], 0, []
        began, expected, num_forced, masks = time.process_time(), list[int](), 0, list[bytes]()
        try:
            forced, guess = self._forced_tokens(), self._tokenizer.known(guess)
            follows = guess[: len(forced)] == forced
            expected, masks = self._read_ahead(guess if follows else forced, len(forced), began)
            num_forced = len(forced)
        except GrammarError:
            self._num_drafts, self._matcher = 0, self._start.deep_copy()
            self._matcher.consume_tokens(self._tokens.tolist())
        self._debt += max(0.0, time.process_time() - began - AHEAD_SECONDS)
        return expected, num_forced, masks

    def _forced_tokens(self) -> list[int]:
        if not self._forced:
            self._forced.extend(self._tokenizer.forced_tokens(self._matcher))
        return list(itertools.islice(self._forced, 2 * self._num_drafts + 1))

    def _read_ahead(self, tokens: list[int], num_forced: int, began: float) -> tuple[list[int], list[bytes]]:
        """Of tokens, of which the first ones are forced, those that are allowed, and masks."""
        masks, read = list[bytes](), 0
        for token_id in tokens[: self._num_drafts]:
            if time.process_time() - began > AHEAD_SECONDS:
                break
            read += self._matcher.try_consume_tokens([token_id])
            mask = self._mask() if read > len(masks) else None
            if mask is None:
                break
            masks.append(mask)
        else:
            if num_forced < len(tokens):
                read += self._matcher.try_consume_tokens(tokens[len(masks) :])
        self._matcher.rollback(read)
        _check(self._matcher)
        return tokens[: max(num_forced, read)], masks

    def _mask(self) -> bytes | None:
        if self._matcher.is_stopped():
            return None
        mask, continues = self._tokenizer.mask(self._matcher, hide_eos=self._hide_eos)
        if not continues and not self._matcher.is_accepting():
            raise GrammarError(NO_TOKEN)
        return mask if continues else None


def _definition(job: GrammarJob) -> str:
    if job.kind == "json":
        return LLMatcher.grammar_from_json_schema(job.source, overrides=job.options)  # type: ignore[arg-type]
    source = "start: " + pattern(job.source) if job.kind == "regex" else job.source
    return LLMatcher.grammar_from_lark(source)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        error = matcher.get_error().replace("<non-verbose/>", "").strip()
        raise GrammarError(NO_TOKEN if error == "NoExtensionBias" else error)
