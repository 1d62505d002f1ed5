"""Random choices for a config, and what configs of many families share."""

from collections.abc import Callable
from typing import Any

import numpy as np

MAX_POSITION = 64
Config = dict[str, Any]


class Chance:
    """Random choices for a config."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def of(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def some(self, **keys: Any) -> Config:
        """Each key with even chance."""
        return {key: value for key, value in keys.items() if self.rng.random() < 0.5}

    def sizes(self) -> Config:
        """What every family has."""
        kv_heads = self.of(1, 2, 4)
        return {
            "vocab_size": 96,
            "hidden_size": self.of(32, 48),
            "intermediate_size": self.of(40, 64),
            "num_hidden_layers": self.of(2, 3, 4, 7),
            "num_attention_heads": kv_heads * self.of(1, 2) if kv_heads > 1 else 4,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": MAX_POSITION,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **self.some(rms_norm_eps=1e-4, tie_word_embeddings=self.of(True, False), head_dim=self.of(8, 16)),
            **self.some(hidden_act=self.of("silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new")),
        }

    def rope(self, *kinds: str, pairs: int = 0, partial: float | None = None) -> Config:
        """Rope parameters of one of the kinds, by the names of transformers 4 or 5, or none at all."""
        kind = self.of("default", "none", *kinds)
        original = {} if self.rng.random() < 0.3 else {"original_max_position_embeddings": self.of(8, 16, 32)}
        keys = {
            "default": {},
            "none": {},
            "linear": {"factor": self.of(2.0, 3.5)},
            "dynamic": {"factor": 2.0},
            "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
            "yarn": {"factor": self.of(4.0, 8.0, 1.0), **original, **self.yarn()},
            "longrope": {
                "short_factor": self.rng.uniform(1, 2, pairs).round(3).tolist(),
                "long_factor": self.rng.uniform(1, 8, pairs).round(3).tolist(),
                **original,
                **self.some(attention_factor=1.3, factor=4.0),
            },
        }[kind]
        theta = self.some(rope_theta=self.of(500.0, 1000.0, 1e6))
        share = {} if partial is None else self.of({"partial_rotary_factor": partial}, {})
        if kind == "none":
            return {**theta, **share}
        if self.rng.random() < 0.5:
            named = {self.of("rope_type", "type"): kind, **keys}
            return {**theta, **share, "rope_scaling": named if kind != "default" else None}
        return {"rope_parameters": {"rope_type": kind, **keys, **theta, **share}}

    def yarn(self) -> Config:
        """The keys of yarn that may be left out."""
        return {
            **self.some(beta_fast=16.0, beta_slow=2.0, truncate=False),
            **self.of({}, {"attention_factor": 1.2}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 0.7}),
        }

    def types(self, config: Config) -> list[str]:
        """A type for each layer."""
        return [self.of("full_attention", "sliding_attention") for _ in range(config["num_hidden_layers"])]


ROPES = ("linear", "dynamic", "llama3", "yarn")
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def head_dim(config: Config) -> int:
    """As transformers reckons it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


Families = dict[str, Callable[[Chance], Config]]
"""What makes a config, by name, which is its model_type if the config has none."""
