"""The training run: AdamW over a warm-up and a cosine, with its progress on the terminal."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast

from caching.attention.spec import AttentionSpec
from engine.models.decoder import Decoder
from engine.models.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.step_context import StepContext
from scripts.demo.attention import CausalAttention
from scripts.demo.corpus import ROW_LENGTH, Batch, Corpus, sample_texts
from scripts.demo.export import export_model
from scripts.demo.sample import sums_right, tell
from scripts.demo.tokenizer import MAX_LENGTH, save_tokenizer, train_tokenizer

SEED = 2024
VOCAB_SIZE = 2048
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
ROWS, LONG_ROWS = 8, 2
LONG_EVERY = 8
LOG_EVERY, SAMPLE_EVERY = 50, 500

Params = nnx.State[Any, Any]
TrainStep = Callable[[Params, optax.OptState, Batch], tuple[Params, optax.OptState, Array]]


def train_demo_model(directory: Path, steps: int, console: Console) -> None:
    """Make the tokenizer, train for ``steps`` steps and write both to ``directory``, now and then as it goes."""
    tokenizer = train_tokenizer(sample_texts(SEED, stories=6000, conversations=6000), VOCAB_SIZE)
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    model = Decoder(Partition(model_spec(tokenizer)), nnx.Rngs(SEED))
    console.print(f"{_count(model):,} parameters, {steps} steps, to {directory}")
    _run(model, tokenizer, steps, directory, console)
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


def _run(model: Decoder, tokenizer: PreTrainedTokenizerFast, steps: int, directory: Path, console: Console) -> None:
    graph, params = nnx.split(model)
    optimizer = build_optimizer(steps)
    optimizer_state = optimizer.init(params)
    train_step = build_train_step(graph, optimizer)
    corpus = Corpus(tokenizer, SEED)
    losses: list[Array] = []
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan, speed=0.0)
        since = time.monotonic()
        for step in range(1, steps + 1):
            batch = corpus.long(LONG_ROWS) if step % LONG_EVERY == 0 else corpus.packed(ROWS)
            params, optimizer_state, loss = train_step(params, optimizer_state, batch)
            losses.append(loss)
            if step % LOG_EVERY == 0 or step == steps:
                mean = float(np.mean(jax.device_get(losses)))
                speed = len(losses) * ROWS * ROW_LENGTH / (time.monotonic() - since)
                console.print(f"step {step:5d}  loss {mean:.4f}  {speed:,.0f} tokens/s")
                progress.update(task, completed=step, loss=mean, speed=speed)
                losses, since = [], time.monotonic()
            if step % SAMPLE_EVERY == 0 or step == steps:
                nnx.update(model, params)
                export_model(model, directory)
                console.print(tell(model, tokenizer, "Once upon a time"), style="italic", markup=False)


def build_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW (decay on matrices alone), gradients clipped to a norm of 1."""
    warmup = min(WARMUP_STEPS, steps // 2)
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_LEARNING_RATE, warmup, steps, PEAK_LEARNING_RATE / 100)

    adam = optax.adamw(rate, b2=0.98, weight_decay=0.05, mask=_is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def build_train_step(graph: nnx.GraphDef[Decoder], optimizer: optax.GradientTransformation) -> TrainStep:
    """One compiled step; parameters and optimizer state are donated."""

    def loss_of(params: Params, batch: Batch) -> Array:
        model = nnx.merge(graph, params)
        caches = [None] * model.partition.model.num_layers
        attention = CausalAttention(jnp.asarray(batch.segments))
        step = StepContext(model.rotations(jnp.asarray(batch.positions)), attention)
        _, hidden = model(jnp.asarray(batch.inputs), caches, step)
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), batch.targets)
        return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

    def step(params: Params, state: optax.OptState, batch: Batch) -> tuple[Params, optax.OptState, Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def _is_matrix(params: Params) -> Params:
    marks: Params = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    return marks


def _count(model: Decoder) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)
