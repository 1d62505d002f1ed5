"""The model we ship: its sizes, what it learns, and what it is written with."""

from pathlib import Path

import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from caching.attention.spec import AttentionSpec
from engine.models.decoder import Decoder
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from scripts.demo.corpus import Batch, Corpus, sample_texts
from scripts.demo.export import export_model
from scripts.demo.sample import sums_right, tell
from scripts.demo.tokenizer import MAX_LENGTH, save_tokenizer, train_tokenizer
from scripts.demo.train import train

SEED = 2024
VOCAB_SIZE = 2048
PEAK_LEARNING_RATE = 3e-3
GENERATION: dict[str, object] = {"temperature": 0.2, "top_p": 0.9}
"""Of 1,000 stories scripts/demo/judge.py finds none with a broken word, 5 with a stray name, and 996 different."""


def train_demo_model(directory: Path, steps: int, console: Console) -> None:
    """Make the tokenizer, train for ``steps`` steps and write both to ``directory``, now and then as it goes."""
    tokenizer = train_tokenizer(sample_texts(SEED, stories=6000, conversations=6000), VOCAB_SIZE)
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    model = Decoder(Partition(model_spec(tokenizer)), nnx.Rngs(SEED))

    def save() -> None:
        export_model(model, directory, GENERATION)
        console.print(tell(model, tokenizer, "Once upon a time"), style="italic", markup=False)

    train(model, cross_entropy, Corpus(tokenizer, SEED).batches(), steps, PEAK_LEARNING_RATE, save, console)
    for operator in "+-":
        console.print(f"sums a {operator} b up to 20 that are right: {sums_right(model, tokenizer, operator):.1%}")


def model_spec(tokenizer: PreTrainedTokenizerFast) -> ModelSpec:
    """Small enough for 8 MB in float32."""
    attention = SelfAttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, scores=AttentionSpec(32**-0.5))
    return ModelSpec(
        vocab_size=len(tokenizer),
        hidden_size=192,
        blocks=(BlockSpec(attention, GatedSpec(384)),) * 5,
        max_position=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        eos_token_ids=(int(tokenizer.eos_token_id),),
    )


def cross_entropy(model: Decoder, batch: Batch) -> Array:
    """f32[], of the batch's targets, each by its weight."""
    losses = optax.softmax_cross_entropy_with_integer_labels(batch.logits(model), batch.targets)
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)
