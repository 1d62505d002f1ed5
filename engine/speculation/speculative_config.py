"""How tokens are drafted that a step may verify beside the next one: ``--speculative-config``.

Names and defaults are those of vLLM 0.11 (``SpeculativeConfig`` in vllm/config/speculative.py).
"""

from msgspec import DecodeError, Struct, ValidationError, json
from msgspec.structs import force_setattr

from engine.errors import ConfigurationError
from engine.request_limits import MAX_SPECULATIVE_TOKENS

NGRAM, DRAFT_MODEL, EAGLE3, MTP = METHODS = ("ngram", "draft_model", "eagle3", "mtp")
DEFAULT_LOOKUP = 5
"""Tokens of an n-gram, where neither the most nor the fewest are said (vLLM's)."""
MAX_LOOKUP = 32
MAX_LOOKUP_HISTORY = 65_536
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Drafts of one method. Raises ValueError, which names the key that is out of range.

    ``num_speculative_tokens`` are the most drafts of a sequence in a step. ``ngram`` looks for the
    last ``prompt_lookup_max`` tokens earlier in the sequence, else for fewer, down to
    ``prompt_lookup_min``, and drafts what followed them there. If one of these two is left out, it
    is the other, and without both they are 5; one of this method always has both.
    ``prompt_lookup_history`` tokens of the tenant's earlier requests are looked in, too. ``draft_model``
    has a ``model``, named as the daemon's own is, write the drafts, and ``eagle3`` a draft head;
    ``mtp`` a layer of the model's own checkpoint, or an assistant of Gemma 4, which is a ``model``.
    """

    method: str = ""
    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_history: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        _require(self.method in METHODS, "method", ", ".join(METHODS), self.method or None)
        count, most = self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS
        _require(1 <= count <= most, "num_speculative_tokens", f"from 1 to {most}", count)
        if self.method != NGRAM:
            self._check_draft_model()
            return
        self._check_left_out("model")
        smallest, largest = self.lookup_sizes
        _require(1 <= largest <= MAX_LOOKUP, "prompt_lookup_max", f"from 1 to {MAX_LOOKUP}", largest)
        allowed = f"from 1 to prompt_lookup_max ({largest})"
        _require(1 <= smallest <= largest, "prompt_lookup_min", allowed, smallest)
        history, most = self.prompt_lookup_history, MAX_LOOKUP_HISTORY
        if history is not None:
            _require(1 <= history <= most, "prompt_lookup_history", f"from 1 to {most:,}", history)
        force_setattr(self, "prompt_lookup_max", largest)
        force_setattr(self, "prompt_lookup_min", smallest)

    def _check_draft_model(self) -> None:
        what = {DRAFT_MODEL: "the draft model's", EAGLE3: "the draft head's", MTP: "an assistant's"}[self.method]
        if self.method != MTP or self.model is not None:
            _require(bool(self.model), "model", f"{what} name or directory", self.model)
        self._check_left_out("prompt_lookup_max", "prompt_lookup_min", "prompt_lookup_history")

    def _check_left_out(self, *keys: str) -> None:
        for key in keys:
            value = getattr(self, key)
            _require(value is None, key, f"left out beside the method {self.method}", value)

    @property
    def has_model(self) -> bool:
        """Whether a draft model writes the drafts, or a draft head: one that has weights."""
        return self.method != NGRAM

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """The fewest and the most tokens of an n-gram that is looked for."""
        given = [size for size in (self.prompt_lookup_min, self.prompt_lookup_max) if size is not None]
        return (given[0], given[-1]) if given else (DEFAULT_LOOKUP, DEFAULT_LOOKUP)


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The configuration that this JSON object has. Raises ConfigurationError."""
    try:
        return json.decode(text, type=SpeculativeConfig)
    except ValidationError as error:
        raise ConfigurationError(f"speculative_config: {error}") from error
    except (DecodeError, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"speculative_config must be JSON, such as {EXAMPLE}, not {text!r}: {error}"
        ) from error


def _require(holds: bool, key: str, allowed: str, given: object) -> None:
    if not holds:
        raise ValueError(f"{key} must be {allowed}, not {given!r}")
