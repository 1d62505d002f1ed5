"""Experts as they are described, token by token in float64: what engine/models/layers/experts.py is compared with."""

from math import erf

import numpy as np

from engine.models.layers.activation import Activation, ClampedGate
from engine.models.layers.expert_router import Scoring

ERF = np.vectorize(erf, otypes=[np.float64])
ACTIVATED = {
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.GELU: lambda x: x * (1 + ERF(x / np.sqrt(2))) / 2,
    Activation.GELU_TANH: lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.RELU_SQUARED: lambda x: np.square(np.maximum(x, 0)),
}
"""Elementwise."""


def chosen_experts(spec, weights, x):
    """Of each token its experts, from the best, and their weights; and the least gap that decided between scores, but for ties."""
    router, found, gaps = spec.router, [], [1.0]
    for token in x.astype(np.float64):
        scores = scored(router, weights, token)
        ranked = scores + weights.get("correction", 0.0)
        if router.groups > 1:
            groups = ranked.reshape(router.groups, -1)
            of_groups = np.sort(groups, axis=1)[:, -router.best_of_group :].sum(axis=1)
            best = np.argsort(-of_groups, kind="stable")[: router.groups_per_token]
            gaps += gaps_between(of_groups)
            ranked = np.where(np.isin(np.arange(router.groups), best)[:, None], groups, -np.inf).reshape(-1)
        gaps += gaps_between(ranked[np.isfinite(ranked)])
        experts = np.argsort(-ranked, kind="stable")[: spec.experts_per_token]
        if router.scoring is Scoring.SPARSE_MIXER:
            limits = [np.abs(distances(scores, expert) - 2 * router.jitter) for expert in experts]
            gaps += [gap for gap in np.concatenate(limits).tolist() if gap]
        found.append((experts, weighted(router, weights, scores, experts)))
    return found, min(gaps)


def scored(router, weights, token):
    """The score of each expert."""
    if router.norm_eps is not None:
        token = normed(token, weights["router_norm"], router.norm_eps) * len(token) ** -0.5
    logits = token @ weights["router"] + weights.get("router_bias", 0.0)
    if router.scoring is Scoring.SOFTMAX:
        return softmax(logits)
    return 1 / (1 + np.exp(-logits)) if router.scoring is Scoring.SIGMOID else logits


def weighted(router, weights, scores, experts):
    """The weights of the chosen."""
    values = scores[experts]
    if router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        values = softmax(values)
    elif router.scoring is Scoring.SPARSE_MIXER:
        values = np.array([share(scores, experts, place, router.jitter) for place in range(len(experts))])
    elif router.normalised:
        values = values / (values.sum() + router.least_sum)
    return values * router.scale * weights.get("expert_scale", np.ones(len(scores)))[experts]


def share(scores, experts, place, jitter):
    """Of the softmax over the experts near to one of the chosen, those chosen before it left out."""
    is_near = distances(scores, experts[place]) <= 2 * jitter
    is_near[experts[:place]] = False
    return 1 / np.exp(scores[is_near] - scores[experts[place]]).sum()


def distances(scores, expert):
    """How far below one expert's score each score is, as a part of the larger of the two."""
    below = scores[expert] - scores
    return np.divide(below, np.maximum(np.abs(scores), scores[expert]), out=np.zeros(len(scores)), where=below != 0)


def mixed(spec, weights, x):
    """f64[tokens, hidden]: what the experts and the shared one make of x, and ``chosen_experts``' gap."""
    chosen, gap = chosen_experts(spec, weights, x)
    made = []
    for token, (experts, values) in zip(x.astype(np.float64), chosen, strict=True):
        norms, total = weights.get("norms"), 0.0
        of_experts = token if norms is None else normed(token, norms["experts"], spec.branch_norm_eps)
        for expert, value in zip(experts, values, strict=True):
            if spec.router.weighs_input:
                total = total + fed(spec, weights, expert, of_experts * value)
            else:
                total = total + fed(spec, weights, expert, of_experts) * value
        total = total if norms is None else normed(total, norms["experts_post"], spec.branch_norm_eps)
        if spec.shared is not None:
            of_shared = token if norms is None else normed(token, norms["shared"], spec.branch_norm_eps)
            parts = np.tensordot(of_shared, weights["shared_gate_up"], 1)
            shared = activated(spec.shared.activation, parts, spec.shared.gate_scale) @ weights["shared_down"]
            if spec.shared_gate:
                shared = shared / (1 + np.exp(-(of_shared @ weights["shared_gate"])))
            total = total + (shared if norms is None else normed(shared, norms["shared_post"], spec.branch_norm_eps))
        made.append(total)
    return np.stack(made), gap


def fed(spec, weights, expert, token):
    """One expert's answer to one token."""
    parts = np.tensordot(token, weights["gate_up"][expert], 1)
    if spec.bias:
        parts = parts + weights["gate_up_bias"][expert]
    return activated(spec.activation, parts) @ weights["down"][expert] + (
        weights["down_bias"][expert] if spec.bias else 0.0
    )


def activated(activation, parts, gate_scale=1.0):
    """Of gate and up f64[2, columns], or of up alone f64[1, columns]."""
    if len(parts) == 1:
        return ACTIVATED[activation](parts[0])
    gate, up = parts
    if isinstance(activation, ClampedGate):
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
        return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))
    return ACTIVATED[activation](gate * gate_scale) * up


def softmax(logits):
    """Of one row."""
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def normed(x, scale, eps):
    """RMSNorm of one row."""
    return x / np.sqrt(np.mean(np.square(x)) + eps) * scale


def gaps_between(scores):
    """Differences between neighbours that are not equal."""
    return [gap for gap in np.diff(np.sort(scores)).tolist() if gap]
