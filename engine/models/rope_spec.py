"""A layer's rotary position embedding as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """How positions enter a layer: rotary position embedding (Su et al. 2021), scaled or not.

    ``scaling`` is ``default``, ``linear`` (positions divided by ``factor``), ``llama3``
    (wavelengths above ``original_max_position / low_freq_factor`` divided by ``factor``, those
    below ``original_max_position / high_freq_factor`` unchanged, blended between), ``yarn`` (Peng
    et al. 2023: the same by the rotations ``beta_fast`` and ``beta_slow``), ``longrope`` (Ding et
    al. 2024: a factor for each frequency) or ``proportional`` (Gemma 4: the pairs behind the first
    ``turning_pairs`` do not turn).
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotary_dim: int | None = None
    """The leading dimensions of a head that are rotated; None is all, 0 a layer without rope."""
    interleaved: bool = False
    """Whether dimension 2i turns with 2i + 1, instead of i with i + rotary_dim / 2."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""
    long_attention_factor: float | None = None
    """By this instead where ``long_factor`` is used."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn blends between whole dimensions."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """Used by a server whose ``max_model_len`` is above ``original_max_position``."""
    turning_pairs: int = 0
    query_scale_beta: float = 0.0
    """Queries are multiplied by ``1 + beta * log(1 + position // original_max_position)``."""
    query_scale_start: int = 0
    """The position that this counts the first token as."""


NO_ROPE = RopeSpec(rotary_dim=0)
