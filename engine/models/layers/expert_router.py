"""The router of a layer of experts: which experts compute a token, and with what weights."""

from dataclasses import dataclass
from enum import Enum, auto

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.adapters.adapted import AdapterRows
from engine.models.layers.norm import RMSNorm
from engine.models.linear import linear
from engine.models.requirements import require
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.parameters import LAYER, tensors


class Scoring(Enum):
    """From an expert's logit to its weight."""

    SOFTMAX = auto()
    """Over all experts."""
    SIGMOID = auto()
    SOFTMAX_OF_CHOSEN = auto()
    """Logits choose, and the softmax is over the chosen (gpt-oss, Granite)."""
    SPARSE_MIXER = auto()
    """Each of the chosen has its share of a softmax over those that come near to it (Liu et al. 2024, Phi-3.5-MoE)."""


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighted, in float32. Hashable."""

    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = True
    """The weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """Weights are multiplied by it in the end (``routed_scaling_factor``)."""
    groups: int = 1
    """Experts are in so many equal groups, and only those of the best groups are chosen from."""
    groups_per_token: int = 1
    best_of_group: int = 2
    """A group's score is the sum of so many of its best: 2 in DeepSeek-V3 and GLM-4, 1 in V2."""
    correction: bool = False
    """A learned number is added to each score to choose by, and not to weigh by."""
    bias: bool = False
    """The logits have a bias."""
    weighs_input: bool = False
    """Weights multiply the input of an expert, not its output (Llama 4)."""
    norm_eps: float | None = None
    """If set, the input goes through an RMSNorm, and is divided by sqrt(hidden) (Gemma 4)."""
    expert_scale: bool = False
    """Each expert's weight is multiplied by a learned number (Gemma 4)."""
    jitter: float = 0.0
    """An expert is near to another by half the relative difference of their logits (SPARSE_MIXER)."""
    least_sum: float = 1e-20
    """Added to the sum that weights are divided by, which may be zero for sigmoids."""

    def check(self, experts: int, chosen: int) -> None:
        """Raises UnsupportedError for numbers of experts that it cannot choose from."""
        require(chosen <= experts, f"{chosen} experts a token are more than the {experts} experts")
        require(experts % self.groups == 0, f"{self.groups} groups do not divide the {experts} experts")
        require(
            self.groups_per_token <= self.groups,
            f"{self.groups_per_token} groups a token are more than the {self.groups} groups of experts",
        )
        each = experts // self.groups
        require(
            chosen <= self.groups_per_token * each,
            f"{chosen} experts a token are more than those of {self.groups_per_token} groups of {each}",
        )
        require(
            self.groups == 1 or self.best_of_group <= each,
            f"groups of {each} experts are scored by their best {self.best_of_group}",
        )


LIKELIEST = RouterSpec()
"""Those of the highest probabilities, renormalised (Mixtral)."""


class Router(nnx.Module):
    """A float32 kernel f32[hidden, experts], never quantised: rounding it would change choices."""

    def __init__(
        self, spec: RouterSpec, hidden_size: int, experts: int, experts_per_token: int, make: ParameterFactory
    ) -> None:
        hidden, scores, gate = {"hidden": hidden_size}, {"scores": experts}, f"{LAYER}mlp.gate."
        self.kernel = make.kernel("mlp.router.kernel", hidden, scores, tensors(f"{gate}weight"), exact=True)
        self.bias = make.bias("mlp.router.bias", scores, tensors(f"{gate}bias"), exact=True) if spec.bias else None
        correction = tensors(f"{gate}e_score_correction_bias")
        self.correction = (
            make.bias("mlp.router.correction", scores, correction, exact=True) if spec.correction else None
        )
        norm, by_expert = tensors(f"{LAYER}router.scale"), tensors(f"{LAYER}router.per_expert_scale")
        self.norm = RMSNorm("mlp.router.norm", hidden, spec.norm_eps, norm, make) if spec.norm_eps is not None else None
        self.expert_scale = make.scale("mlp.router.expert_scale", scores, by_expert) if spec.expert_scale else None
        self.spec, self.experts_per_token = spec, experts_per_token

    def __call__(self, x: Array, adapters: AdapterRows | None) -> tuple[Array, Array]:
        """f[tokens, hidden] -> weights f32 and experts i32 [tokens, experts_per_token].

        The likeliest expert comes first; of equals the one with the lower number.
        """
        spec, logits = self.spec, self._logits(x, adapters)
        scores = _scored(logits, spec.scoring)
        ranked = scores if self.correction is None else scores + self.correction[...][None]
        if spec.groups == 1 and self.correction is None:
            ranked = logits  # which differ where scores are all 1 or 0
        chosen = jax.lax.top_k(_of_best_groups(ranked, spec), self.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
            weights = jax.nn.softmax(weights, axis=1)
        elif spec.scoring is Scoring.SPARSE_MIXER:
            weights = _sparsely_mixed(logits, chosen, spec.jitter)
        elif spec.normalised:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(spec.least_sum))
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...][chosen]
        return weights * np.float32(spec.scale), chosen

    def _logits(self, x: Array, adapters: AdapterRows | None) -> Array:
        """f32[tokens, experts]."""
        wide = x.astype(jnp.float32)
        if self.norm is not None:
            wide = self.norm(wide) * np.float32(x.shape[-1] ** -0.5)
        # By default a TPU rounds the factors of float32 products to bfloat16.
        with jax.default_matmul_precision("highest"):
            return linear(wide, self.kernel, self.bias, adapters)


def _scored(logits: Array, scoring: Scoring) -> Array:
    if scoring is Scoring.SOFTMAX:
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if scoring is Scoring.SIGMOID else logits


def _sparsely_mixed(logits: Array, chosen: Array, jitter: float) -> Array:
    """The weights f32[tokens, chosen]: none counts for those that are chosen after it."""
    weights, left = [], logits
    for place in range(chosen.shape[1]):
        best = jnp.take_along_axis(logits, chosen[:, place : place + 1], axis=1)
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > np.float32(2 * jitter)
        near = jnp.where(is_far, np.float32(0), jnp.exp(left - best))
        weights.append(1 / near.sum(axis=1))
        is_chosen = jax.nn.one_hot(chosen[:, place], logits.shape[1], dtype=jnp.bool_)
        left = jnp.where(is_chosen, -jnp.inf, left)
    return jnp.stack(weights, axis=1)


def _of_best_groups(ranked: Array, spec: RouterSpec) -> Array:
    """f32[tokens, experts], -inf in all but the best groups."""
    if spec.groups == 1:
        return ranked
    grouped = ranked.reshape(ranked.shape[0], spec.groups, -1)
    scores = jax.lax.top_k(grouped, spec.best_of_group)[0].sum(axis=-1)
    best = jax.lax.top_k(scores, spec.groups_per_token)[1]
    is_best = jax.nn.one_hot(best, spec.groups, dtype=jnp.bool_).any(axis=1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(ranked.shape)
