"""What a request asks of the tokens it gets: vLLM's names and defaults, every field honoured or refused."""

import math

import msgspec

from engine.structured_outputs import StructuredOutputsParams

MAX_SEED = 2**32 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 256


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of one request; constructing it checks ranges and raises ValueError naming the parameter.

    ``max_tokens`` None means until the context is full. ``temperature`` 0 is greedy. ``top_k`` 0 or -1
    keeps every token. ``seed`` None draws one at admission. ``stop`` strings end the text before them.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.temperature <= 100, "temperature", "from 0 to 100", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(-1 <= self.top_k < 2**31, "top_k", "0 or -1 (all) or a count of tokens", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        _require(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", f"from 0 to {MAX_SEED}", self.seed)
        _require(len(self.stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings", len(self.stops))
        for stop in self.stops:
            _require(0 < len(stop) <= MAX_STOP_LENGTH, "stop", f"strings of 1 to {MAX_STOP_LENGTH} characters", stop)

    @property
    def stops(self) -> list[str]:
        """The stop strings, one given as a bare string included."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


def _require(holds: bool, name: str, allowed: str, given: object) -> None:
    if not holds or (isinstance(given, float) and math.isnan(given)):
        raise ValueError(f"{name} must be {allowed}, not {given!r}")
