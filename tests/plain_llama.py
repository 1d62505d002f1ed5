"""Llama in numpy, one token after the other, each with the weights that it is given: an oracle for weights that change."""

from typing import Any

import numpy as np
from checkpoints import Tensors
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class PlainLlama:
    """Its keys and values stay as they were made, whatever weights later tokens are given."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._keys: list[list[Numbers]] = [[] for _ in range(config["num_hidden_layers"])]
        self._values: list[list[Numbers]] = [[] for _ in range(config["num_hidden_layers"])]
        self.num_tokens = 0

    def add(self, token: int, weights: Tensors) -> Numbers:
        """The log-probabilities f64[vocabulary] of the token that follows."""
        config = self._config
        x = np.float64(weights["model.embed_tokens.weight"][token])
        for layer in range(config["num_hidden_layers"]):
            own = {
                name.removeprefix(f"model.layers.{layer}."): np.float64(tensor)
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            x = x + self._attend(layer, self._norm(x, own["input_layernorm.weight"]), own)
            y = self._norm(x, own["post_attention_layernorm.weight"])
            gate = own["mlp.gate_proj.weight"] @ y
            x = x + own["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (own["mlp.up_proj.weight"] @ y))
        self.num_tokens += 1
        logits = np.float64(weights["lm_head.weight"]) @ self._norm(x, np.float64(weights["model.norm.weight"]))
        shifted = logits - logits.max()
        result: Numbers = shifted - np.log(np.exp(shifted).sum())
        return result

    def _attend(self, layer: int, x: Numbers, own: dict[str, Numbers]) -> Numbers:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        q, k, v = (own[f"self_attn.{name}_proj.weight"] @ x for name in "qkv")
        self._keys[layer].append(self._rotate(k.reshape(kv_heads, -1)))
        self._values[layer].append(v.reshape(kv_heads, -1))
        queries = self._rotate(q.reshape(heads, -1))
        keys, values = (
            np.repeat(np.stack(cached[layer]), heads // kv_heads, axis=1) for cached in (self._keys, self._values)
        )
        scores = np.einsum("hd,thd->ht", queries, keys) / np.sqrt(queries.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
        return own["self_attn.o_proj.weight"] @ attended.reshape(-1)

    def _rotate(self, x: Numbers) -> Numbers:
        half = x.shape[1] // 2
        angles = self.num_tokens * self._config.get("rope_theta", 10_000.0) ** (-np.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    def _norm(self, x: Numbers, scale: Numbers) -> Numbers:
        result: Numbers = x / np.sqrt(np.mean(x**2) + self._config["rms_norm_eps"]) * scale
        return result
