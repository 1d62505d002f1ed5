"""*small* with a language: random weights whose greedy text is what a prompt has said, or what none has.

Random weights have no language. Greedy, *small* says one token for ever, which any lookup drafts and no text is like; drawn,
it says any of 32,000 tokens, of which hardly any comes twice. So here the head's row of a token is the embedding of the
token before it, and embeddings weigh more than what the layers, which stay random, add to them: a token is followed by its
successor. All successors are one circle through the vocabulary, and a text that walks along it says nothing twice. It
costs a step what *small* does: it reads a head of its own, and of the embedding a row a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.models import SIZES, Size, random_tensor, written

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EMBEDDING_SCALE, HEAD_SCALE = 0.3, 0.02
"""Standard deviations of entries. The layers add to an embedding what leaves its successor the likeliest token."""
FIRST_WORD = 257
"""The tokens before are the end mark and bytes, which nothing follows."""


def circle(vocabulary: int) -> np.ndarray:
    """i64[words]: every word once, each before its successor; the first follows the last."""
    return np.random.default_rng(0).permutation(np.arange(FIRST_WORD, vocabulary))


@dataclass(frozen=True, kw_only=True)
class Speaker(Size):
    """A decoder in Llama's layout with a head of its own."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See ModelShape."""
        yield from super().tensors()
        yield HEAD, (self.vocabulary, self.hidden)

    def config(self) -> dict[str, object]:
        """See ModelShape."""
        return super().config() | {"tie_word_embeddings": False}


class Tensors:
    """Draws the tensors of a model in which each word's successor is the likeliest token after it."""

    def __init__(self) -> None:
        self._embedding = np.zeros((0, 0), np.float32)

    def draw(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """See Draw; the embedding comes before the head."""
        if name == EMBEDDING:
            self._embedding = rng.standard_normal(shape, np.float32)
            return self._embedding * np.float32(EMBEDDING_SCALE)
        if name != HEAD:
            return random_tensor(rng, name, shape)
        head, words = rng.standard_normal(shape, np.float32), circle(shape[0])
        head[np.roll(words, -1)] = self._embedding[words]
        return head * np.float32(HEAD_SCALE)


def speaking_model() -> Path:
    """The directory of *small* with a language, made if need be."""
    small = SIZES["small"]
    shape = Speaker(hidden=small.hidden, layers=small.layers, heads=small.heads, kv_heads=small.kv_heads, ffn=small.ffn)
    return written("small-speaking", shape, Tensors().draw)
