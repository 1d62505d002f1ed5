"""A request's sampling parameters: vLLM's names and defaults. No field is ignored."""

import math

import msgspec

from engine.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_PRIORITY,
    MAX_SALT,
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TIMEOUT,
)
from engine.structured_outputs import StructuredOutputsParams


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stop at a loop: ``min_count`` equal patterns in a row, sizes in tokens (vLLM's names)."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name, largest = "repetition_detection.max_pattern_size", self.max_pattern_size
        _require(1 <= largest <= MAX_PATTERN_SIZE, name, f"from 1 to {MAX_PATTERN_SIZE}", largest)
        name, smallest = "repetition_detection.min_pattern_size", self.min_pattern_size
        _require(1 <= smallest <= largest, name, f"from 1 to max_pattern_size ({largest})", smallest)
        name, count = "repetition_detection.min_count", self.min_count
        _require(2 <= count <= MAX_PATTERN_COUNT, name, f"from 2 to {MAX_PATTERN_COUNT}", count)


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of one request. Raises ValueError, which names the parameter out of range.

    ``max_tokens`` None means until the context is full. ``temperature`` 0 is greedy. ``top_k`` 0
    or -1 keeps every token. ``seed`` None draws one at admission; sample i of ``n`` uses the i-th
    after it. ``stop`` strings end the text before them, or with ``include_stop_str_in_output``
    after them, once there are ``min_tokens`` tokens. A lower ``priority`` is served first.
    ``timeout_s`` limits the whole request, ``queue_timeout_s`` the time until its first step.
    Requests with the same ``cache_salt`` share prefix hits; one without ``enable_prefix_caching``
    shares none. A step verifies at most ``num_speculative_tokens`` drafts of it, and never more than
    the daemon's: 0 is none, None the daemon's. Of a prompt only the last ``truncate_prompt_tokens`` are used; with -1 as many as
    leave room for ``max_tokens``. Values that depend on the vocabulary (ids, words) are checked
    where it is known.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_detection: RepetitionDetection | None = None
    num_speculative_tokens: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    enable_prefix_caching: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.n <= MAX_N, "n", f"from 1 to {MAX_N}", self.n)
        self._check_lengths()
        _require(
            abs(self.priority) <= MAX_PRIORITY, "priority", f"from -{MAX_PRIORITY} to {MAX_PRIORITY}", self.priority
        )
        _require(len(self.cache_salt) <= MAX_SALT, "cache_salt", f"at most {MAX_SALT} characters", self.cache_salt)
        self._check_distribution()
        self._check_tokens()
        self._check_stops()
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}", count)

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _check_lengths(self) -> None:
        most = self.max_tokens
        _require(most is None or most >= 1, "max_tokens", "at least 1", most)
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        _require(most is None or self.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})", self.min_tokens)
        drafts, allowed = self.num_speculative_tokens, f"from 0 to {MAX_SPECULATIVE_TOKENS}"
        _require(drafts is None or 0 <= drafts <= MAX_SPECULATIVE_TOKENS, "num_speculative_tokens", allowed, drafts)
        allowed = f"above 0 and at most {MAX_TIMEOUT:g} seconds"
        kept = self.truncate_prompt_tokens
        _require(kept is None or kept >= 1 or kept == -1, "truncate_prompt_tokens", "at least 1, or -1", kept)
        for name, timeout in (("timeout_s", self.timeout_s), ("queue_timeout_s", self.queue_timeout_s)):
            _require(timeout is None or 0 < timeout <= MAX_TIMEOUT, name, allowed, timeout)

    def _check_distribution(self) -> None:
        _require(0 <= self.temperature <= 100, "temperature", "from 0 to 100", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(-1 <= self.top_k < 2**31, "top_k", "0 or -1 (all) or a count of tokens", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2", self.frequency_penalty)
        repetition = self.repetition_penalty  # a smaller divisor makes logits infinite
        _require(0.01 <= repetition <= 10, "repetition_penalty", "from 0.01 to 10", repetition)
        _require(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"from 0 to {MAX_SEED}", self.seed)

    def _check_tokens(self) -> None:
        count = len(self.logit_bias)
        _require(count <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} ids", count)
        for token_id, bias in self.logit_bias.items():
            _require(-100 <= bias <= 100, f"logit_bias[{token_id}]", "from -100 to 100", bias)
        allowed = self.allowed_token_ids
        _require(allowed is None or len(allowed) > 0, "allowed_token_ids", "at least one token id", allowed)
        count = 0 if allowed is None else len(allowed)
        most = f"at most {MAX_ALLOWED_TOKEN_IDS} ids"
        _require(count <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids", most, count)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        count = len(self.stop_token_ids)
        _require(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", count)

    def _check_stops(self) -> None:
        _check_strings("stop", self.stops, MAX_STOPS)
        left_out = "left out where detokenize is false: there is no text"
        _require(self.detokenize or not self.stops, "stop", left_out, self.stops)


def _check_strings(name: str, strings: list[str], most: int) -> None:
    count = len(strings)
    _require(count <= most, name, f"at most {most} strings", count)
    for string in strings:
        _require(0 < len(string) <= MAX_STOP_LENGTH, name, f"strings of 1 to {MAX_STOP_LENGTH} characters", string)


def _require(holds: bool, name: str, allowed: str, given: object) -> None:
    if not holds or (isinstance(given, float) and math.isnan(given)):
        raise ValueError(f"{name} must be {allowed}, not {given!r}")
