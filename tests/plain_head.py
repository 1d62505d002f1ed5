"""A draft head of EAGLE-3 in numpy, over whole texts, and the hidden states of a Llama that it reads.

As it is published: a token and the hidden states of the token before are one pair, and pairs count from 0 on.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def layer_inputs(config: dict[str, Any], tensors: dict[str, NDArray[Any]], text: list[int]) -> list[Numbers]:
    """f64[tokens, hidden] before each layer of a Llama."""
    weights = {name: np.float64(tensor) for name, tensor in tensors.items()}
    x, inputs = weights["model.embed_tokens.weight"][text], []
    for layer in range(config["num_hidden_layers"]):
        inputs.append(x)
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        normed = norm(config, x, own["input_layernorm.weight"])
        x = x + Attention(config, own).all_of(normed)
        x = x + feed_forward(own, norm(config, x, own["post_attention_layernorm.weight"]))
    return inputs


class PlainHead:
    """A head with the embedding of its model, if it has none."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, NDArray[Any]], embedding: NDArray[Any]) -> None:
        self._config = config
        weights = {name: np.float64(tensor) for name, tensor in tensors.items()}
        self._own = {}
        for name, tensor in weights.items():
            for prefix in ("midlayer.", "layers.0."):
                if name.startswith(prefix):
                    self._own[name.removeprefix(prefix)] = tensor
        self._weights = weights
        self._embedding = weights.get("embed_tokens.weight", np.float64(embedding))
        places = tensors.get("d2t", np.zeros(len(tensors["lm_head.weight"]), np.int64))
        self.tokens = places + np.arange(len(places))

    def drafts(self, taps: list[Numbers], text: list[int], count: int) -> list[list[tuple[int, float]]]:
        """For each text of 2 tokens and more, ``count`` drafts of what follows it, each with how far it is before the
        next one. ``taps`` are f64[tokens, tapped]."""
        features = np.concatenate(taps, axis=-1) @ self._weights["fc.weight"].T
        attention = Attention(self._config, self._own)
        drafts = []
        for last in range(1, len(text)):
            hidden = self._pair(attention, features[last - 1], text[last])
            drafts.append(self._chain(attention.branch(), hidden, count))
        return drafts

    def _chain(self, attention: "Attention", hidden: Numbers, count: int) -> list[tuple[int, float]]:
        drafts: list[tuple[int, float]] = []
        while True:
            logits = self._weights["lm_head.weight"] @ norm(self._config, hidden, self._weights["norm.weight"])
            second, first = np.sort(logits)[-2:]
            drafts.append((int(self.tokens[logits.argmax()]), float(first - second)))
            if len(drafts) == count:
                return drafts
            hidden = self._pair(attention, hidden, drafts[-1][0])

    def _pair(self, attention: "Attention", feature: Numbers, token: int) -> Numbers:
        config, own = self._config, self._own
        normed = norm(config, feature, own["hidden_norm.weight"])
        x = normed if config.get("norm_before_residual") else feature
        embedded = norm(config, self._embedding[token], own["input_layernorm.weight"])
        x = x + attention.next(np.concatenate([embedded, normed]))
        return x + feed_forward(own, norm(config, x, own["post_attention_layernorm.weight"]))


class Attention:
    """Of one layer: what it has of the tokens so far."""

    def __init__(self, config: dict[str, Any], own: dict[str, Numbers]) -> None:
        self._config, self._own = config, own
        self._keys: list[Numbers] = []
        self._values: list[Numbers] = []

    def branch(self) -> "Attention":
        """The same, to go on from here."""
        other = Attention(self._config, self._own)
        other._keys, other._values = [*self._keys], [*self._values]
        return other

    def all_of(self, x: Numbers) -> Numbers:
        """f64[tokens, hidden] of f64[tokens, hidden]."""
        return np.stack([self.next(row) for row in x])

    def next(self, x: Numbers) -> Numbers:
        """f64[hidden] of the next token's f64[inputs]."""
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        q, k, v = (self._own[f"self_attn.{name}_proj.weight"] @ x for name in "qkv")
        q, k = self._rotated(q.reshape(heads, -1)), self._rotated(k.reshape(kv_heads, -1))
        self._keys.append(k)
        self._values.append(v.reshape(kv_heads, -1))
        keys, values = (np.repeat(np.stack(kept), heads // kv_heads, axis=1) for kept in (self._keys, self._values))
        scores = np.einsum("hd,thd->ht", q, keys) / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
        projected: Numbers = self._own["self_attn.o_proj.weight"] @ attended.reshape(-1)
        return projected

    def _rotated(self, x: Numbers) -> Numbers:
        half = x.shape[1] // 2
        angles = len(self._keys) * self._config.get("rope_theta", 10_000.0) ** (-np.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def feed_forward(own: dict[str, Numbers], x: Numbers) -> Numbers:
    """SwiGLU."""
    gate = x @ own["mlp.gate_proj.weight"].T
    made: Numbers = (gate / (1 + np.exp(-gate)) * (x @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return made


def norm(config: dict[str, Any], x: Numbers, scale: Numbers) -> Numbers:
    """RMSNorm."""
    normed: Numbers = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]) * scale
    return normed
