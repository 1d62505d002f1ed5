"""The fields that bodies of all kinds have.

Fields that OpenAI's and vLLM's clients send and that do not change the answer are accepted:
``user``, ``metadata``, ``client_metadata``, ``store`` (nothing is stored), ``service_tier``,
``safety_identifier``, ``session_id``, ``prompt_cache_key`` and ``prompt_cache_retention`` (prefixes
are always cached).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.request_limits import MAX_REQUEST_ID_LENGTH, MAX_SEED
from engine.sampling_params import RepetitionDetection, SamplingParams

SHARED = frozenset(SamplingParams.__struct_fields__) - {"logprobs", "structured_outputs"}
"""Fields of SamplingParams that a body may have under the same name and in the same meaning."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
GivenId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"\A[!-~]*\Z")]


MAX_INT64 = 2**63 - 1
UNSEEDED = -1
"""vLLM's word for no seed."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream: with ``include_usage`` its last event has the usage and no choices, and
    with ``continuous_usage_stats`` all others have the usage so far.

    Obfuscation is padding, of which there is none here.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all kinds have. The fields of SamplingParams have its names."""

    model: str | None = None
    stream: bool | None = None
    request_id: GivenId | None = None

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: str | list[str] | None = None

    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    num_speculative_tokens: int | None = None
    priority: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def _shared_params(self) -> dict[str, Any]:
        """What SamplingParams has under the same name and in the same meaning. Seeds are OpenAI's, of 64 bits, of which
        the last 32 are ours."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name in SHARED}
        given["seed"] = None if self.seed in (None, UNSEEDED) else self.seed & MAX_SEED
        given = {name: value for name, value in given.items() if value is not None}
        if self.repetition_detection is not None:
            given["repetition_detection"] = msgspec.to_builtins(self.repetition_detection)
        return given
