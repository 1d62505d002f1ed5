"""Tiny assistants of Gemma 4 with random weights, as they are published, and the models whose pages they read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VARIANTS, Tensors, build_checkpoint
from head_checkpoints import write
from numpy.typing import NDArray

CONTEXT = 96
VARIANT = "gemma4"
TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": 144,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
CONFIG = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 48,
    "tie_word_embeddings": True,
    "text_config": TEXT,
}
FEW_KEYS = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""As the larger models have it: each layer has keys of its own, full ones fewer, which are values, too."""


@dataclass(frozen=True)
class OfGemma:
    """What an assistant's config.json has beside CONFIG, its seed, and what its model's has beside the variant's."""

    seed: int
    config: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> dict[str, Any]:
        """The config.json."""
        return CONFIG | self.config

    @property
    def of_model(self) -> dict[str, Any]:
        """The model's."""
        return {**VARIANTS[VARIANT].config, **self.overrides, "max_position_embeddings": CONTEXT}


ASSISTANTS = {
    "assistant": OfGemma(1),
    "assistant in clusters": OfGemma(
        2,
        {
            "use_ordered_embeddings": True,
            "num_centroids": 12,
            "centroid_intermediate_top_k": 4,
            "text_config": {**TEXT, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        },
        FEW_KEYS,
    ),
}


def build_assisted(directory: Path, name: str) -> Path:
    """Writes the model that an assistant is for."""
    return build_checkpoint(directory, VARIANT, **ASSISTANTS[name].of_model)


def build_assistant(directory: Path, name: str, **overrides: Any) -> Path:
    """Writes an assistant's directory and returns it; ``overrides`` are keys of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**ASSISTANTS[name].whole, **overrides}, indent=2))
    write(directory / "model.safetensors", assistant_tensors(name))
    return directory


def assistant_tensors(name: str) -> Tensors:
    """By the names of its checkpoint."""
    config, rng = ASSISTANTS[name].whole, np.random.default_rng(ASSISTANTS[name].seed)
    text, model = config["text_config"], config["backbone_hidden_size"]
    hidden, ffn, vocabulary = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "pre_projection.weight": (hidden, 2 * model),
        "post_projection.weight": (model, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = config["num_centroids"], hidden
    for layer, layer_type in enumerate(text["layer_types"]):
        head_dim = text["global_head_dim" if layer_type == "full_attention" else "head_dim"]
        queries = text["num_attention_heads"] * head_dim
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        own = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
            "layer_scalar": (1,),
            **{f"{norm}.weight": (hidden,) for norm in norms},
        }
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in own.items()}
    tensors: Tensors = {key: _random(rng, key, shape).astype(np.float32) for key, shape in shapes.items()}
    if config.get("use_ordered_embeddings"):
        tensors["masked_embedding.token_ordering"] = rng.permutation(vocabulary)
    return tensors


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Large where a layer adds to what it reads: or else keys and values would change few drafts."""
    noise = rng.standard_normal(shape)
    if "norm" in name or name.endswith("layer_scalar"):
        return (4.0 if ".post_" in name else 1.0) + 0.2 * noise
    if "embed_tokens" in name:
        return 0.4 * noise
    return 1.7 * noise / shape[1] ** 0.5
