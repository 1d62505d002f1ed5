"""Tiny models whose checkpoint has a layer that predicts further tokens, as DeepSeek and GLM publish it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VARIANTS, Tensors, build_checkpoint, random_tensors, write_tensors
from moe_checkpoints import attention_shapes, feed_forward_shapes

CONTEXT = 96
SPECULATION = '{"method": "mtp", "num_speculative_tokens": 3}'


@dataclass(frozen=True)
class Predictor:
    """The variant of tests/checkpoints.py that the layer is in the checkpoint of, and its seed."""

    variant: str
    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the config.json."""

    @property
    def config(self) -> dict[str, Any]:
        """The config.json."""
        further = {"num_nextn_predict_layers": 1, "max_position_embeddings": CONTEXT}
        return {**VARIANTS[self.variant].config, **self.overrides, **further}

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return int(self.config["num_hidden_layers"])


PREDICTORS = {
    "mtp of GLM": Predictor("glm4_moe", 1, {"num_hidden_layers": 2}),
    "mtp of DeepSeek": Predictor("deepseek_v3", 2),
    "mtp of GLM Flash": Predictor("glm4_moe_lite", 3),
}


def build_predicting(directory: Path, name: str, *, layers: int | None = None) -> Path:
    """Writes a model and its further layer; or as a model of so many ``layers``, all of them its own."""
    predictor = PREDICTORS[name]
    overrides = {key: value for key, value in predictor.config.items() if key != "num_hidden_layers"}
    if layers is not None and "mlp_layer_types" in overrides:
        overrides["mlp_layer_types"] = [*overrides["mlp_layer_types"], "sparse"]
    build_checkpoint(directory, predictor.variant, num_hidden_layers=layers or predictor.layer, **overrides)
    write_tensors(directory, predicting_tensors(name) if layers is None else without_predictor(name))
    return directory


def predicting_tensors(name: str) -> Tensors:
    """The model's tensors and the layer's. Its copies of the model's tables are others, which nobody reads."""
    predictor = PREDICTORS[name]
    return random_tensors(predictor.config, VARIANTS[predictor.variant].seed) | layer_tensors(name)


def without_predictor(name: str) -> Tensors:
    """The same without what makes the layer differ from a model's own."""
    prefix = f"model.layers.{PREDICTORS[name].layer}."
    others = tuple(prefix + other for other in ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens"))
    return {each: tensor for each, tensor in predicting_tensors(name).items() if not each.startswith(others)}


def layer_tensors(name: str) -> Tensors:
    """The layer's, by the names of its checkpoint."""
    predictor = PREDICTORS[name]
    config, layer, rng = predictor.config, predictor.layer, np.random.default_rng(predictor.seed)
    hidden = config["hidden_size"]
    table = config["vocab_size"], hidden
    types = {"mlp_layer_types": [*config["mlp_layer_types"], "sparse"]} if "mlp_layer_types" in config else {}
    shapes = {**attention_shapes(config, layer), **dict(feed_forward_shapes(config | types, layer))}
    shapes |= {"eh_proj.weight": (hidden, 2 * hidden), "embed_tokens.weight": table, "shared_head.head.weight": table}
    shapes |= {f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return {
        f"model.layers.{layer}.{each}": _random(rng, each, shape).astype(np.float32) for each, shape in shapes.items()
    }


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Large where the layer adds to what it reads: or else all drafts of a text would be alike."""
    noise = rng.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    return (5.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.7) * noise / shape[1] ** 0.5
