"""A draft model for the model we ship: a smaller decoder that learns the distribution of the shipped model's next token.

It reads what the shipped model has read. What it is to say of a token is not the text's next one but all that the
shipped model thinks of it: which of the tokens that could follow the shipped model prefers decides whether a draft is
accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.console import Console
from transformers import AutoTokenizer

from caching.attention.spec import AttentionSpec
from engine.devices.mesh import one_device
from engine.hub.names import DEMO_MODEL
from engine.models.decoder import Decoder
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.store import load_decoder
from engine.models.weights.weight_format import WeightFormat
from scripts.demo.corpus import Batch, Corpus
from scripts.demo.export import export_model
from scripts.demo.train import train

SEED = 2025
DTYPE = "bfloat16"
PEAK_LEARNING_RATE = 6e-3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lesson:
    """A batch and what the target thinks of it."""

    batch: Batch
    probabilities: Array
    """f32[rows, length, vocab] of each token to be the next."""


def train_draft_model(directory: Path, steps: int, console: Console) -> None:
    """Train for ``steps`` steps and write the model to ``directory``, now and then as it goes.

    It has no tokenizer: its vocabulary is that of the model we ship.
    """
    tokenizer, target = AutoTokenizer.from_pretrained(DEMO_MODEL), load_model(DEMO_MODEL)
    draft = Decoder(Partition(draft_spec(target.partition.model)), nnx.Rngs(SEED))

    def save() -> None:
        export_model(draft, directory, {}, DTYPE)

    learned_from = lessons(target, Corpus(tokenizer, SEED).batches())
    train(draft, soft_cross_entropy, learned_from, steps, PEAK_LEARNING_RATE, save, console)


def load_model(directory: Path) -> Decoder:
    """The decoder of a Hugging Face directory, in float32."""
    partition, form = Partition(read_model_config(directory)), WeightFormat(np.dtype(np.float32))
    source = open_checkpoint(directory)
    return load_decoder(source, partition, form, mesh=one_device(), progress=lambda *_: None)


def draft_spec(target: ModelSpec) -> ModelSpec:
    """Of one layer, and with less than a seventh of the target's weights."""
    attention = SelfAttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scores=AttentionSpec(32**-0.5))
    return replace(target, hidden_size=96, blocks=(BlockSpec(attention, GatedSpec(192)),))


def lessons(target: Decoder, batches: Iterator[Batch]) -> Iterator[Lesson]:
    """Batches with what the target says of each."""
    graph, params = nnx.split(target)
    think = jax.jit(lambda params, batch: jax.nn.softmax(batch.logits(nnx.merge(graph, params))))
    return (Lesson(batch, think(params, batch)) for batch in batches)


def soft_cross_entropy(draft: Decoder, lesson: Lesson) -> Array:
    """f32[]: the cross entropy of the draft's distributions to the target's, each by its weight.

    It is that at temperature 1 and that at 1/2: most texts are drawn at lower temperatures, where the likeliest tokens
    alone matter.
    """
    logits, probabilities, weights = lesson.batch.logits(draft), lesson.probabilities, lesson.batch.weights
    sharper = probabilities**2 / jnp.sum(probabilities**2, axis=-1, keepdims=True)
    losses = _cross_entropy(logits, probabilities) + _cross_entropy(2 * logits, sharper)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def _cross_entropy(logits: Array, probabilities: Array) -> Array:
    """Of f32[..., vocab], as f32[...]."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * probabilities, axis=-1)
