"""Trains a LoRA adapter of the model that oDriver ships: its heroes move into a lighthouse.

    python -m scripts.examples.train_lora --out adapters/lighthouse

Its texts are the stories that the model was trained on, with another home in them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.hub.names import DEMO_MODEL
from scripts.demo.cast import HOMES
from scripts.demo.corpus import Batch, Document
from scripts.demo.sample import tell
from scripts.demo.stories import tell_story
from scripts.examples.lora import Lora, merged, new_lora, save_adapter
from scripts.examples.trainable import Trainable

LIGHTHOUSE = "in a lighthouse on a rock in the sea"
LEARNING_RATE = 1e-2
ROWS, ROW_LENGTH = 8, 192
"""A row is one story; few are longer."""
SEED, HELD_OUT_SEED = 19, 20
LOG_EVERY = 10

Step = Callable[[Lora, optax.OptState, Batch], tuple[Lora, optax.OptState, Array]]


def train(model: Trainable, tokenizer: PreTrainedTokenizerFast, steps: int) -> Lora:
    """An adapter after so many steps, with the loss on the terminal: nats a token."""
    lora, optimizer = new_lora(model.tensors, SEED), optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    state, step, rng = optimizer.init(lora), build_step(model, optimizer), Random(SEED)
    for number in range(1, steps + 1):
        lora, state, loss = step(lora, state, draw_batch(tokenizer, rng))
        if number % LOG_EVERY == 0 or number == 1:
            print(f"step {number:4d}  loss {loss:.3f}", flush=True)
    return lora


def build_step(model: Trainable, optimizer: optax.GradientTransformation) -> Step:
    """One compiled step; the base model's tensors are constant."""

    def step(lora: Lora, state: optax.OptState, batch: Batch) -> tuple[Lora, optax.OptState, Array]:
        loss, gradients = jax.value_and_grad(lambda lora: mean_loss(model, lora, batch))(lora)
        updates, state = optimizer.update(gradients, state, lora)
        return optax.apply_updates(lora, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def mean_loss(model: Trainable, lora: Lora, batch: Batch) -> Array:
    """f32[]: the cross-entropy of a batch's targets, by their weights."""
    log_probs = model.log_probs(merged(model.tensors, lora), batch)
    return -jnp.sum(log_probs * batch.weights) / jnp.sum(batch.weights)


def draw_batch(tokenizer: PreTrainedTokenizerFast, rng: Random) -> Batch:
    """A story in each row."""
    batch = Batch.empty(ROWS, ROW_LENGTH)
    for row in range(ROWS):
        ids = [*tokenizer.encode(tell_lighthouse_story(rng)), int(tokenizer.eos_token_id)]
        batch.place(row, 0, 1, Document(ids, [1.0] * len(ids)))
    return batch


def tell_lighthouse_story(rng: Random) -> str:
    """A story of the shipped model's training, at home in the lighthouse."""
    story = tell_story(rng)
    for home in HOMES:
        story = story.replace(home, LIGHTHOUSE).replace(_sentence(home), _sentence(LIGHTHOUSE))
    return story


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def main() -> None:
    """Train, save, and say what has been learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the adapter is written")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help=f"steps of {ROWS} stories")
    options = parser.parse_args()
    model, tokenizer = Trainable(DEMO_MODEL), AutoTokenizer.from_pretrained(DEMO_MODEL)
    lora = train(model, tokenizer, options.steps)
    save_adapter(lora, options.out)
    held_out = draw_batch(tokenizer, Random(HELD_OUT_SEED))
    loss = jax.jit(lambda lora: mean_loss(model, lora, held_out))
    before, after = loss(new_lora(model.tensors, SEED)), loss(lora)
    print(f"loss of {ROWS} new stories: {before:.3f} without the adapter, {after:.3f} with it")
    print(tell(model.decoder(merged(model.tensors, lora)), tokenizer, "Once upon a time"))


if __name__ == "__main__":
    main()
