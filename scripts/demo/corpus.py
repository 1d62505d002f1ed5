"""What the model reads: documents drawn without end, cut into tokens and packed into rows.

A packed row holds whole documents side by side, each at positions from 0 and blind to its neighbours, as every prompt
is at service. A long row is one document up to the model's last position, so that long conversations hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from engine.models.decoder import Decoder
from scripts.demo.attention import hidden_of_rows
from scripts.demo.chat import Message, ask_for_story, draw_conversation
from scripts.demo.stories import tell_story

ROW_LENGTH, LONG_ROW_LENGTH = 256, 1024
ROWS, LONG_ROWS = 8, 2
"""Of a batch."""
LONG_EVERY = 8
"""Every so many batches one has long rows."""
_STORY_SHARE, _ASKED_STORY_SHARE = 0.25, 0.12
_USER_WEIGHT = 0.1
_POOL_SIZE = 48


@dataclass(frozen=True)
class Document:
    """Token ids and how much it matters to predict each of them: what a user says is not for us to guess."""

    ids: list[int]
    weights: list[float]

    def __add__(self, other: "Document") -> "Document":
        return Document(self.ids + other.ids, self.weights + other.weights)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens, all [rows, length]: i32 but for the weights, f32. ``segments`` number a row's documents from 1; 0 is padding."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    positions: NDArray[np.int32]
    segments: NDArray[np.int32]
    weights: NDArray[np.float32]

    @classmethod
    def empty(cls, rows: int, length: int) -> "Batch":
        """All padding."""
        inputs, targets, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
        return cls(inputs, targets, positions, segments, np.zeros((rows, length), np.float32))

    def place(self, row: int, start: int, segment: int, document: Document) -> int:
        """Write a document, as far as the row reaches; returns where it ends."""
        end = min(start + len(document.ids) - 1, int(self.inputs.shape[1]))
        length = end - start
        self.inputs[row, start:end] = document.ids[:length]
        self.targets[row, start:end] = document.ids[1 : length + 1]
        self.positions[row, start:end] = np.arange(length)
        self.segments[row, start:end] = segment
        self.weights[row, start:end] = document.weights[1 : length + 1]
        return end

    def logits(self, model: Decoder) -> Array:
        """f32[rows, length, vocab] what the model says of each target."""
        inputs, positions, segments = map(jnp.asarray, (self.inputs, self.positions, self.segments))
        return model.logits(hidden_of_rows(model, inputs, positions, segments))


class Corpus:
    """An endless, repeatable stream of batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._pool = [self._draw() for _ in range(_POOL_SIZE)]

    def batches(self) -> Iterator[Batch]:
        """Without end, each of ROWS packed rows or LONG_ROWS long ones: as many tokens."""
        for number in count(1):
            yield self.long(LONG_ROWS) if number % LONG_EVERY == 0 else self.packed(ROWS)

    def packed(self, rows: int) -> Batch:
        """Rows of ROW_LENGTH filled with whole documents, the longest that fits first."""
        batch = Batch.empty(rows, ROW_LENGTH)
        for row in range(rows):
            end = 0
            for segment in range(1, ROW_LENGTH):
                fitting = [i for i, document in enumerate(self._pool) if len(document.ids) - 1 <= ROW_LENGTH - end]
                if not fitting:
                    break
                longest = max(fitting, key=lambda i: len(self._pool[i].ids))
                end = batch.place(row, end, segment, self._pool[longest])
                self._pool[longest] = self._draw()
        return batch

    def long(self, rows: int) -> Batch:
        """Rows of LONG_ROW_LENGTH, each one long conversation or story after story."""
        batch = Batch.empty(rows, LONG_ROW_LENGTH)
        for row in range(rows):
            draw = self._story if self._rng.random() < 0.3 else self._long_conversation
            document = draw()
            while len(document.ids) <= LONG_ROW_LENGTH:
                document = document + draw()
            batch.place(row, 0, 1, document)
        return batch

    def _draw(self) -> Document:
        kind = self._rng.random()
        if kind < _STORY_SHARE:
            return self._story()
        if kind < _STORY_SHARE + _ASKED_STORY_SHARE:
            user, assistant = ask_for_story(self._rng)
            return self.encode_chat([{"role": "user", "content": user}, {"role": "assistant", "content": assistant}])
        exchanges = self._rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6))
        return self.encode_chat(draw_conversation(self._rng, exchanges, story_share=0.0))

    def _story(self) -> Document:
        """A story, now and then from its second or third sentence on."""
        story = tell_story(self._rng)
        if self._rng.random() < 0.1:
            story = story.split(". ", maxsplit=self._rng.choice((1, 2)))[-1]
        return self.encode_text(story)

    def _long_conversation(self) -> Document:
        return self.encode_chat(draw_conversation(self._rng, exchanges=12))

    def encode_text(self, text: str) -> Document:
        """A plain text and its end."""
        ids = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        return Document(ids, [1.0] * len(ids))

    def encode_chat(self, messages: list[Message]) -> Document:
        """A conversation, token for token what the chat template makes of it."""
        document = Document([], [])
        for message in messages:
            text = self._tokenizer.apply_chat_template([message], tokenize=False)
            ids = self._tokenizer.encode(str(text))
            weight = 1.0 if message["role"] == "assistant" else _USER_WEIGHT
            document = document + Document(ids, [weight] * len(ids))
        return document


def sample_texts(seed: int, stories: int, conversations: int) -> Iterator[str]:
    """Texts for the tokenizer to learn from."""
    rng = Random(seed)
    for _ in range(stories):
        yield tell_story(rng)
    for _ in range(conversations):
        yield from (message["content"] for message in draw_conversation(rng, exchanges=1, story_share=0.0))
