"""A training run: AdamW over a warm-up and a cosine, with its progress on the terminal."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.models.decoder import Decoder
from scripts.demo.corpus import ROW_LENGTH, ROWS

WARMUP_STEPS = 100
LOG_EVERY, SAVE_EVERY = 50, 500

Lesson = TypeVar("Lesson")
"""What a step learns from: a pytree of arrays."""
Loss = Callable[[Decoder, Lesson], Array]
"""f32[], of a model and a lesson."""
Params = nnx.State[Any, Any]
TrainStep = Callable[[Params, optax.OptState, Lesson], tuple[Params, optax.OptState, Array]]


def train(
    model: Decoder,
    loss: Loss[Lesson],
    lessons: Iterator[Lesson],
    steps: int,
    peak_rate: float,
    save: Callable[[], None],
    console: Console,
) -> None:
    """Teach the model ``steps`` lessons. ``save`` is called now and then, and at the end, with the model up to date."""
    console.print(f"{_count(model):,} parameters, {steps} steps")
    graph, params = nnx.split(model)
    optimizer = build_optimizer(steps, peak_rate)
    optimizer_state = optimizer.init(params)
    train_step = build_train_step(graph, loss, optimizer)
    losses: list[Array] = []
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan, speed=0.0)
        since = time.monotonic()
        for step in range(1, steps + 1):
            params, optimizer_state, mean_loss = train_step(params, optimizer_state, next(lessons))
            losses.append(mean_loss)
            if step % LOG_EVERY == 0 or step == steps:
                mean = float(np.mean(jax.device_get(losses)))
                speed = len(losses) * ROWS * ROW_LENGTH / (time.monotonic() - since)
                console.print(f"step {step:5d}  loss {mean:.4f}  {speed:,.0f} tokens/s")
                progress.update(task, completed=step, loss=mean, speed=speed)
                losses, since = [], time.monotonic()
            if step % SAVE_EVERY == 0 or step == steps:
                nnx.update(model, jax.tree.map(np.asarray, params))
                save()


def build_optimizer(steps: int, peak_rate: float) -> optax.GradientTransformation:
    """AdamW (decay on matrices alone), gradients clipped to a norm of 1."""
    warmup = min(WARMUP_STEPS, steps // 2)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak_rate, warmup, steps, peak_rate / 100)

    adam = optax.adamw(rate, b2=0.98, weight_decay=0.05, mask=_is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def build_train_step(
    graph: nnx.GraphDef[Decoder], loss: Loss[Lesson], optimizer: optax.GradientTransformation
) -> TrainStep[Lesson]:
    """One compiled step; parameters and optimizer state are donated."""

    def loss_of(params: Params, lesson: Lesson) -> Array:
        return loss(nnx.merge(graph, params), lesson)

    def step(params: Params, state: optax.OptState, lesson: Lesson) -> tuple[Params, optax.OptState, Array]:
        value, gradients = jax.value_and_grad(loss_of)(params, lesson)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

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
