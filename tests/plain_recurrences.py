"""The recurrences of caching/state in float64, a row and a token at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caching.state.delta_rule import DeltaInputs
from caching.state.state_space import StateSpaceInputs

Wide = NDArray[np.float64]
Token = Callable[[Wide, Any], tuple[Wide, Wide]]
"""A state and a token's inputs -> the state after it, and its output."""


def delta_token(state: Wide, token: DeltaInputs) -> tuple[Wide, Wide]:
    """[heads, key_dim, value_dim] -> the same, and [heads, value_dim]."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (token.q, token.k))
    _, group, value_dim = token.v.shape
    new, out = state.copy(), np.zeros((len(state), value_dim))
    for head in range(len(state)):
        key, each = divmod(head, group)
        s = new[head] * np.exp(token.log_decay[key, each])
        s = s + np.outer(k[key], token.beta[key, each] * (token.v[key, each] - s.T @ k[key]))
        new[head], out[head] = s, s.T @ q[key] / np.sqrt(len(q[key]))
    return new, out


def state_space_token(state: Wide, token: StateSpaceInputs) -> tuple[Wide, Wide]:
    """[heads, head_dim, state_size] -> the same, and [heads, head_dim]."""
    new, out = state.copy(), np.zeros(state.shape[:2])
    for head in range(len(state)):
        group, each = divmod(head, token.x.shape[1])
        decayed = new[head] * np.exp(token.log_decay[group, each])
        new[head] = decayed + np.outer(token.dt[group, each] * token.x[group, each], token.b[group])
        out[head] = new[head] @ token.c[group]
    return new, out


def plain_scan(token: Token, state: Wide, inputs: Any) -> tuple[Wide, Wide]:
    """One row: the state after inputs [length, ...], and the outputs [length, ...]."""
    outputs = []
    for place in range(len(inputs[0])):
        state, output = token(state, type(inputs)(*(np.float64(x[place]) for x in inputs)))
        outputs.append(output)
    return state, np.stack(outputs)


def plain_convolution(before: Wide, x: Wide, weights: Wide, bias: Wide | None) -> tuple[Wide, Wide]:
    """One row: the last ``taps - 1`` of [taps - 1, channels] and [length, channels], and the sums [length, channels]."""
    whole, taps = np.concatenate([before, x]), len(weights)
    sums = [(whole[place : place + taps] * weights).sum(0) + (0 if bias is None else bias) for place in range(len(x))]
    return whole[len(x) :], np.stack(sums)
