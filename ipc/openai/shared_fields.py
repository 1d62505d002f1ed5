"""The fields that bodies of all kinds have.

Fields that OpenAI's and vLLM's clients send and that do not change the answer are accepted:
``user``, ``metadata``, ``client_metadata``, ``store`` (nothing is stored), ``service_tier``,
``safety_identifier``, ``prompt_cache_key`` and ``prompt_cache_retention`` (prefixes are always
cached).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.request_limits import MAX_REQUEST_ID_LENGTH
from engine.sampling_params import RepetitionDetection, SamplingParams

SHARED = frozenset(SamplingParams.__struct_fields__) - {"logprobs", "structured_outputs"}
"""Fields of SamplingParams that a body may have under the same name and in the same meaning."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
GivenId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"\A[!-~]*\Z")]


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
    seed: int | None = None
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
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def _shared_params(self) -> dict[str, Any]:
        """What SamplingParams has under the same name and in the same meaning."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name in SHARED}
        given = {name: value for name, value in given.items() if value is not None}
        if self.repetition_detection is not None:
            given["repetition_detection"] = msgspec.to_builtins(self.repetition_detection)
        return given
