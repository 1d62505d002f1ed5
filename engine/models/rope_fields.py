"""RopeSpecs from the rope keys of config.json.

The keys mean what they mean in transformers 5 (``modeling_rope_utils``). Its version 4 spellings
are read too: ``rope_theta`` and ``rope_scaling`` for ``rope_parameters``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from engine.models.requirements import Count, Positive, UnsupportedError, require, require_one_of, without_nulls
from engine.models.rope_spec import RopeSpec

NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
        "longrope": ("short_factor", "long_factor"),
        "proportional": (),
    }
)
"""The supported rope types, and the keys that each requires; RopeSpec's have the same names."""

LAYER_TYPES = ("full_attention", "sliding_attention")
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RopeFields(msgspec.Struct, forbid_unknown_fields=True):
    """``rope_parameters`` or ``rope_scaling``; ``type`` is the oldest name of ``rope_type``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: float | None = None
    attn_factor: Positive | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    llama_4_scaling_beta: float | None = None
    # Read by no text model:
    finetuned: Any = None
    max_position_embeddings: Any = None
    mrope_section: Any = None
    mrope_interleaved: Any = None


@dataclass(frozen=True)
class RopeReader:
    """The keys of config.json beside the rope parameters that decide what these mean."""

    head_dim: int
    max_position: int
    """``max_position_embeddings``"""
    original_max_position: int | None
    """``original_max_position_embeddings`` beside the rope parameters, which goes before theirs."""
    rotary_share: float | None
    """``partial_rotary_factor`` beside the rope parameters."""
    is_partial: bool
    """Whether the family's code can leave dimensions without rotation."""
    scales_queries: bool
    """Whether it multiplies queries by ``llama_4_scaling_beta``."""

    def read(self, given: Mapping[str, Any], theta: float) -> RopeSpec:
        """One set of parameters; ``theta`` is for one without ``rope_theta``.

        Raises UnsupportedError for parameters that would mean something else than a RopeSpec can.
        """
        try:
            rope = msgspec.convert(without_nulls(given, RopeFields), RopeFields)
        except msgspec.ValidationError as error:
            raise UnsupportedError(f"rope parameters: {error}") from error
        scaling = rope.rope_type or rope.type or "default"
        require_one_of("rope type", scaling, tuple(NEEDED))
        known = self.original_max_position or rope.original_max_position_embeddings
        if scaling == "yarn" and rope.factor is None and known:
            rope = msgspec.structs.replace(rope, factor=self.max_position / known)
        for key in NEEDED[scaling]:
            require(getattr(rope, key) is not None, f"rope type {scaling!r} needs {key}")
        share = rope.partial_rotary_factor or self.rotary_share or 1
        spec = replace(self._scaled(scaling, rope, share), theta=rope.rope_theta or theta)
        if beta := rope.llama_4_scaling_beta:
            require(self.scales_queries, f"llama_4_scaling_beta {beta} is not supported in this family")
            spec = replace(spec, query_scale_beta=beta, original_max_position=self._original(rope))
        if scaling == "proportional":
            return spec
        if not self.is_partial:
            require_one_of("partial_rotary_factor", share, (1,))
        return spec if share == 1 else replace(spec, rotary_dim=int(self.head_dim * share))

    def _original(self, rope: RopeFields) -> int:
        return self.original_max_position or rope.original_max_position_embeddings or self.max_position

    def _scaled(self, scaling: str, rope: RopeFields, share: float) -> RopeSpec:
        """All but theta and the rotated dimensions; ``share`` of a head's are rotated."""
        original = self._original(rope)
        if scaling == "linear":
            return RopeSpec(scaling=scaling, factor=rope.factor or 1)
        if scaling == "llama3":
            low, high = rope.low_freq_factor or 0, rope.high_freq_factor or 0
            require(low <= high, f"low_freq_factor {low} must not be above high_freq_factor {high}")
            return RopeSpec(10_000.0, scaling, rope.factor or 1, low, high, original)
        if scaling == "yarn":
            return RopeSpec(
                scaling=scaling,
                factor=rope.factor or 1,
                original_max_position=original,
                attention_factor=_yarn_attention_factor(rope),
                beta_fast=rope.beta_fast or 32.0,
                beta_slow=rope.beta_slow or 1.0,
                truncate=rope.truncate,
            )
        if scaling == "longrope":
            return self._longrope(rope, original, share)
        if scaling == "proportional":
            return RopeSpec(scaling=scaling, factor=rope.factor or 1, turning_pairs=int(share * self.head_dim // 2))
        # NTK scaling ("dynamic") begins behind max_position_embeddings, and no sequence is longer.
        return RopeSpec()

    def _longrope(self, rope: RopeFields, original: int, share: float) -> RopeSpec:
        pairs = (int(self.head_dim * share) + 1) // 2
        short, long = tuple(rope.short_factor or ()), tuple(rope.long_factor or ())
        for key, factors in (("short_factor", short), ("long_factor", long)):
            require(len(factors) == pairs, f"{key} has {len(factors)} entries for {pairs} rotated pairs of a head")
        factor, attention_factor = rope.factor or self.max_position / original, rope.attention_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeSpec(
            scaling="longrope",
            original_max_position=original,
            attention_factor=attention_factor,
            short_factor=short,
            long_factor=long,
        )


def _yarn_attention_factor(rope: RopeFields) -> float:
    """As in transformers; ``attn_factor`` is vLLM's, by which DeepSeek-R1-0528-Qwen3-8B takes the rest back."""

    def magnitude(scale: float) -> float:
        factor = rope.factor or 1
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1) * (rope.attn_factor or 1)


def context_length(max_position: int, ropes: tuple[RopeSpec, ...]) -> int:
    """The most positions of a model, stretched if all its layers scale them.

    ``linear`` multiplies ``max_position_embeddings``; ``yarn`` the original length, which is the
    same number unless config.json says another.
    """
    stretched = {
        int(max_position * rope.factor)
        if rope.scaling == "linear"
        else max(max_position, int(rope.original_max_position * rope.factor))
        if rope.scaling == "yarn"
        else max_position
        for rope in ropes
        if rope.rotary_dim != 0
    }
    return min(stretched, default=max_position)
