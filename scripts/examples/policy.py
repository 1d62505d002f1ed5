"""A policy, the samples of a step and their reward, and the trainer that learns from them."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array
from numpy.typing import NDArray

from scripts.demo.corpus import Batch, Document
from scripts.examples.lora import Lora, merged, new_lora
from scripts.examples.trainable import Trainable

LEARNING_RATE = 3e-3
DRIFT_WEIGHT = 0.1
"""Of the estimated divergence from the model without the policy's change. Without it the policy
forgets how to write within ten steps."""
ROW_LENGTH = 48
"""Tokens of a prompt and its completion, with padding."""
_SHE, _HE = {"she", "her"}, {"he", "him", "his"}


class Sample(NamedTuple):
    """One completion that the daemon has drawn."""

    group: int
    """The number of its prompt."""
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """Of each of its tokens, by the daemon, in nats."""
    text: str


class Outcome(NamedTuple):
    """What a step's samples say of the policy that has drawn them."""

    reward: float
    """The mean of all samples."""
    difference: float
    """The largest one between a token's log-probability by the daemon and by the trainer."""
    difference_before: float
    """The same with the trainer's policy of the step before; 0 in the first."""


Arrays = tuple[Batch, NDArray[np.float32], NDArray[np.float32]]
"""The samples' tokens, the daemon's log-probabilities f32[rows, length], advantages f32[rows]."""
Step = Callable[[Lora, Lora, optax.OptState, Arrays], tuple[Lora, optax.OptState, tuple[Array, Array]]]


def reward(text: str) -> float:
    """1 for a text of her alone, with "she" or "her" and none of "he", "him" and "his"; else 0."""
    words = set(re.findall(r"\w+", text.lower()))
    return float(bool(words & _SHE) and not words & _HE)


class Trainer:
    """A policy, which is a model with an adapter, and its optimizer."""

    def __init__(self, model: Trainable, seed: int) -> None:
        self.model = model
        self.lora = new_lora(model.tensors, seed)
        self._before = self.lora
        optimizer = optax.adam(LEARNING_RATE)
        self._state = optimizer.init(self.lora)
        self._step = _build_step(model, optimizer)

    def learn(self, samples: Sequence[Sample]) -> Outcome:
        """One step of the policy gradient, from samples of the policy as it is."""
        rewards = np.array([reward(sample.text) for sample in samples], np.float32)
        advantages = group_advantages(rewards, np.array([sample.group for sample in samples]))
        arrays = (*_rows(samples), advantages)
        learnt, self._state, differences = self._step(self.lora, self._before, self._state, arrays)
        self._before, self.lora = self.lora, learnt
        now, before = map(float, differences)
        return Outcome(float(rewards.mean()), now, before)


def group_advantages(rewards: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """f32[samples]: how far each reward is above its group's mean, in standard deviations."""
    advantages = np.zeros_like(rewards)
    for group in set(groups.tolist()):
        inside = groups == group
        deviation = rewards[inside].std()
        advantages[inside] = (rewards[inside] - rewards[inside].mean()) / (deviation or 1)
    return advantages


def _build_step(model: Trainable, optimizer: optax.GradientTransformation) -> Step:
    def log_ratio(lora: Lora, arrays: Arrays) -> Array:
        """f32[rows, length]: the log of a policy's importance ratio to the daemon's samples."""
        batch, daemon, _ = arrays
        return (model.log_probs(merged(model.tensors, lora), batch) - daemon) * batch.weights

    def loss(lora: Lora, arrays: Arrays) -> tuple[Array, Array]:
        """The clipped objective needs no clip: there is one step for each step's samples."""
        batch, daemon, advantages = arrays
        ratio = log_ratio(lora, arrays)
        gains = jnp.exp(ratio) * advantages[:, None]
        away = (model.log_probs(model.tensors, batch) - daemon) * batch.weights - ratio
        drift = jnp.exp(away) - away - 1  # of KL(policy | model), never negative (Schulman 2020)
        losses = (np.float32(DRIFT_WEIGHT) * drift - gains) * batch.weights
        return jnp.sum(losses) / jnp.sum(batch.weights), jnp.max(jnp.abs(ratio))

    def step(
        lora: Lora, before: Lora, state: optax.OptState, arrays: Arrays
    ) -> tuple[Lora, optax.OptState, tuple[Array, Array]]:
        (_, difference), gradients = jax.value_and_grad(loss, has_aux=True)(lora, arrays)
        updates, state = optimizer.update(gradients, state, lora)
        learnt: Lora = optax.apply_updates(lora, updates)
        return learnt, state, (difference, jnp.max(jnp.abs(log_ratio(before, arrays))))

    return jax.jit(step, donate_argnums=2)


def _rows(samples: Sequence[Sample]) -> tuple[Batch, NDArray[np.float32]]:
    """A row for each sample, in which its own tokens count, and the daemon's f32[rows, length]."""
    batch = Batch.empty(len(samples), ROW_LENGTH)
    daemon = np.zeros((len(samples), ROW_LENGTH), np.float32)
    for row, sample in enumerate(samples):
        weights = [0.0] * len(sample.prompt_ids) + [1.0] * len(sample.token_ids)
        end = batch.place(row, 0, 1, Document(sample.prompt_ids + sample.token_ids, weights))
        assert end == len(weights) - 1, f"{len(weights)} tokens, and a row has {ROW_LENGTH}"
        daemon[row, end - len(sample.token_ids) : end] = sample.log_probs
    return batch, daemon
