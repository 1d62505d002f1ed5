"""The tensors of a published draft head, under the names that its parameters call for."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.models.weights.parameters import TOKENS
from engine.models.weights.sources.tensor_source import RenamedTensors, TensorInfo

RENAMED = (("midlayer.", "layers.0."), ("layers.", "model.layers."), ("norm.", "model.norm."),
           ("embed_tokens.", "model.embed_tokens."))  # fmt: skip
"""Prefixes and what they become, one after the other."""
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""What follows from ``d2t``, and the model's own tensors, which some checkpoints repeat."""


@dataclass(frozen=True)
class DrafterTensors(RenamedTensors):
    """A TensorSource, but for ``renamed``: what all that is trained to draft has in common.

    The tokens that it drafts come in float32, as all parameters are numbers with a fraction.
    """

    vocab_size: int

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        info = super().info(name)
        return replace(info, dtype=np.dtype(np.float32)) if name == TOKENS else info


class HeadTensors(DrafterTensors):
    """A TensorSource: the head's as if it were a model of one layer."""

    def renamed(self, name: str) -> str | None:
        """See RenamedTensors."""
        return None if name in UNUSED else head_name(name)

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError for drafts that are no tokens, or the same."""
        if name != TOKENS:
            return super().read(name, index)
        places = self.source.read(TOKENS, (slice(None),)).astype(np.int64)
        token_ids = places + np.arange(len(places))
        return token_offsets(token_ids, self.vocab_size, self.origin, TOKENS)[index]


def token_offsets(token_ids: NDArray[np.int64], vocab_size: int, origin: str, name: str) -> NDArray[np.float32]:
    """Each of the tokens that a head drafts, less its own number.

    Raises ConfigurationError for what is no token, or the same twice; ``name`` is the tensor's.
    """
    if not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
        raise ConfigurationError(
            f"{origin}: {name} has tokens from {token_ids.min():,} to {token_ids.max():,}, and the vocabulary has "
            f"{vocab_size:,}: the head is for another model"
        )
    if len(np.unique(token_ids)) < len(token_ids):
        raise ConfigurationError(f"{origin}: {name} has a token twice, of which a head drafts each once")
    return (token_ids - np.arange(len(token_ids))).astype(np.float32)


def head_name(name: str) -> str:
    """The name of a head's tensor as of a model's, from the one in its checkpoint."""
    for prefix, other in RENAMED:
        if name.startswith(prefix):
            name = other + name.removeprefix(prefix)
    return name
