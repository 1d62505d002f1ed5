"""Draft heads as data: what each kind has of the model that it drafts for."""

from dataclasses import dataclass
from typing import ClassVar

from engine.models.layers.mixer import KeysAndValues


@dataclass(frozen=True)
class EagleHeadSpec:
    """What a draft head of EAGLE-3 has of the model that it drafts for, and of its vocabulary."""

    taps: tuple[int, ...]
    """The model's layers whose input it reads."""
    tapped_size: int
    """The model's hidden size."""
    num_tokens: int
    """Tokens that it drafts."""
    has_tokens: bool
    """Whether ``d2t`` says which of the vocabulary these are; else they are all of it."""
    has_embedding: bool
    """Whether it embeds tokens itself; else by the model's table."""
    adds_normed: bool
    """Whether it adds to the norm of what it reads, and not to that itself."""


@dataclass(frozen=True)
class MTPHeadSpec:
    """The layer of a model's own checkpoint that predicts the token after the next one."""

    prefix: str
    """Of its tensors."""
    reads_first: bool = False
    """Whether it reads the token at position 1, or zeros in its place."""
    chains_normed: bool = False
    """Whether it reads its own hidden states behind its norm, or before."""
    taps: ClassVar[tuple[int, ...]] = ()
    """It reads what comes out of the model, and the input of no layer."""


@dataclass(frozen=True)
class Clusters:
    """The vocabulary in clusters of equally many tokens, of which a few have logits."""

    count: int
    chosen: int
    """Those whose centroids score highest."""


@dataclass(frozen=True)
class AssistantSpec:
    """What an assistant of Gemma 4 has of the model whose keys and values it reads."""

    model_size: int
    """The model's hidden size."""
    embedding_multiplier: float
    """The model's factor of embedded tokens."""
    pages: tuple[KeysAndValues, ...]
    """What the model's layers have in the pages that are read."""
    clusters: Clusters | None
    """None if all tokens have logits."""
    taps: ClassVar[tuple[int, ...]] = ()
    """It reads what comes out of the model, and the input of no layer."""


HeadSpec = EagleHeadSpec | MTPHeadSpec | AssistantSpec
