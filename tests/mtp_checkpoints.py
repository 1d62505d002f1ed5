"""Tiny models whose checkpoint has a layer that predicts further tokens, as DeepSeek and GLM publish it, or Qwen."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VARIANTS, Tensors, build_checkpoint, random_tensors, write_tensors
from moe_checkpoints import attention_shapes, feed_forward_shapes
from state_checkpoints import norm_scale, qwen_shapes

CONTEXT = 96
SPECULATION = '{"method": "mtp", "num_speculative_tokens": 3}'


@dataclass(frozen=True)
class Predictor:
    """The variant of tests/checkpoints.py that the layer is in the checkpoint of, and its seed."""

    variant: str
    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the config.json."""
    of_qwen: bool = False
    """Whether its tensors have Qwen's names."""

    @property
    def config(self) -> dict[str, Any]:
        """The config.json."""
        further = {"mtp_num_hidden_layers" if self.of_qwen else "num_nextn_predict_layers": 1}
        return {**VARIANTS[self.variant].config, **self.overrides, **further, "max_position_embeddings": CONTEXT}

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return int(self.config["num_hidden_layers"])

    @property
    def prefix(self) -> str:
        """Of its tensors."""
        return "mtp." if self.of_qwen else f"model.layers.{self.layer}."

    @property
    def layers_with_it(self) -> int:
        """Of a model whose last one is the same: the next that is full attention."""
        return self.layer + (self.config.get("full_attention_interval", 4) if self.of_qwen else 1)


PREDICTORS = {
    "mtp of GLM": Predictor("glm4_moe", 1, {"num_hidden_layers": 2}),
    "mtp of DeepSeek": Predictor("deepseek_v3", 2),
    "mtp of GLM Flash": Predictor("glm4_moe_lite", 3),
    "mtp of Qwen3-Next": Predictor("qwen3_next", 4, of_qwen=True),
    "mtp of Qwen3.5": Predictor("qwen3_5", 5, of_qwen=True),
}


def build_predicting(directory: Path, name: str) -> Path:
    """Writes a model and its further layer."""
    predictor = PREDICTORS[name]
    build_checkpoint(directory, predictor.variant, **predictor.config)
    write_tensors(directory, predicting_tensors(name))
    return directory


def build_with_layer(directory: Path, name: str) -> Path:
    """Writes a model whose last layer is the further one."""
    predictor = PREDICTORS[name]
    config = {**predictor.config, "num_hidden_layers": predictor.layers_with_it}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = [*config["mlp_layer_types"], "sparse"]
    build_checkpoint(directory, predictor.variant, **config)
    last, block = f"model.layers.{predictor.layers_with_it - 1}.", block_prefix(predictor)
    own = {name.replace(block, last): each for name, each in layer_tensors(name).items() if name.startswith(block)}
    others = {name for name in own if name.removeprefix(last).startswith(BESIDE)}
    write_tensors(directory, random_tensors(config, 0) | {name: own[name] for name in own.keys() - others})
    return directory


BESIDE = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
"""What the layer has that a model's own has not."""


def block_prefix(predictor: Predictor) -> str:
    """Of those tensors of the layer that a model's own has, too."""
    return f"{predictor.prefix}layers.0." if predictor.of_qwen else predictor.prefix


def predicting_tensors(name: str) -> Tensors:
    """The model's tensors and the layer's. Its copies of the model's tables are others, which nobody reads."""
    predictor = PREDICTORS[name]
    return random_tensors(predictor.config, VARIANTS[predictor.variant].seed) | layer_tensors(name)


def layer_tensors(name: str) -> Tensors:
    """The layer's, by the names of its checkpoint."""
    predictor = PREDICTORS[name]
    config, rng, prefix = predictor.config, np.random.default_rng(predictor.seed), predictor.prefix
    hidden = config["hidden_size"]
    if predictor.of_qwen:
        last = config["num_hidden_layers"] - 1
        shapes = {f"layers.0.{each}": shape for each, shape in qwen_shapes(config, last).items()}
        shapes |= {"fc.weight": (hidden, 2 * hidden)}
        shapes |= {f"{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    else:
        table = config["vocab_size"], hidden
        types = {"mlp_layer_types": [*config["mlp_layer_types"], "sparse"]} if "mlp_layer_types" in config else {}
        shapes = {
            **attention_shapes(config, predictor.layer),
            **dict(feed_forward_shapes(config | types, predictor.layer)),
        }
        shapes |= {
            "eh_proj.weight": (hidden, 2 * hidden), "embed_tokens.weight": table, "shared_head.head.weight": table
        }  # fmt: skip
        shapes |= {f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return {
        f"{prefix}{each}": _random(rng, each, shape, norm_scale(config, each)).astype(np.float32)
        for each, shape in shapes.items()
    }


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], of_norm: float) -> Any:
    """Large where the layer adds to what it reads: or else all drafts of a text would be alike."""
    noise = rng.standard_normal(shape)
    if "norm" in name:
        return of_norm + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    return (5.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.7) * noise / shape[1] ** 0.5
