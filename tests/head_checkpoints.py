"""Tiny draft heads of EAGLE-3 with random weights, in the forms in which they are published, and the models that they are for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import build_checkpoint
from numpy.typing import NDArray

CONTEXT = 96
LAYER = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 144, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "model_type": "llama",
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """A head's config.json, the variant of tests/checkpoints.py that it is for, and what of it is random."""

    target: str
    config: dict[str, Any]
    taps: tuple[int, ...]
    """The layers of the target whose inputs it reads, as its config.json says in one way or another."""
    seed: int
    own_embedding: bool = False
    prefix: str = "midlayer"
    """Of its layer's tensors."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the target's config.json."""

    @property
    def layer(self) -> dict[str, Any]:
        """The keys of its layer."""
        return {**self.config, **self.config.get("transformer_layer_config", {})}


HEADS = {
    "authors": Head(
        "llama2",
        {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 60},
        taps=(2, 3, 4),
        seed=1,
        overrides={"num_hidden_layers": 7},
    ),
    "whole vocabulary": Head(
        "llama2",
        {**LAYER, "architectures": ["LlamaForCausalLMEagle3"]},
        taps=(2, 3, 4),
        seed=4,
        overrides={"num_hidden_layers": 7},
    ),
    "speculators": Head(
        "qwen3",
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 144,
            "norm_before_residual": True,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "transformer_layer_config": LAYER,
        },
        taps=(0, 1, 2),
        seed=2,
        own_embedding=True,
        prefix="layers.0",
    ),
    "another size": Head(
        "llama2",
        {
            **LAYER,
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": 40,
            "target_hidden_size": 48,
            "draft_vocab_size": 100,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
        },
        taps=(1, 2),
        seed=3,
        own_embedding=True,
    ),
}


def build_target(directory: Path, name: str) -> Path:
    """Writes the model that a head is for."""
    head = HEADS[name]
    return build_checkpoint(directory, head.target, max_position_embeddings=CONTEXT, **head.overrides)


def build_head(directory: Path, name: str, **overrides: Any) -> Path:
    """Writes a head's directory and returns it; ``overrides`` are keys of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**HEADS[name].config, **overrides}, indent=2))
    write(directory / "model.safetensors", head_tensors(name))
    return directory


def head_tensors(name: str) -> dict[str, NDArray[Any]]:
    """By the names of its checkpoint."""
    head = HEADS[name]
    layer, rng = head.layer, np.random.default_rng(head.seed)
    hidden, ffn, vocabulary = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    drafts = layer.get("draft_vocab_size", vocabulary)
    q, kv = (layer[key] * layer["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    tapped = (layer.get("target_hidden_size") or hidden) * len(head.taps)
    matrices = {
        "fc": (hidden, tapped),
        f"{head.prefix}.self_attn.q_proj": (q, 2 * hidden),
        f"{head.prefix}.self_attn.k_proj": (kv, 2 * hidden),
        f"{head.prefix}.self_attn.v_proj": (kv, 2 * hidden),
        f"{head.prefix}.self_attn.o_proj": (hidden, q),
        f"{head.prefix}.mlp.gate_proj": (ffn, hidden),
        f"{head.prefix}.mlp.up_proj": (ffn, hidden),
        f"{head.prefix}.mlp.down_proj": (hidden, ffn),
        "lm_head": (drafts, hidden),
        **({"embed_tokens": (vocabulary, hidden)} if head.own_embedding else {}),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    vectors = [*(f"{head.prefix}.{norm}.weight" for norm in norms), "norm.weight"]
    tensors: dict[str, NDArray[Any]] = {
        f"{each}.weight": (_scale(each) * rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for each, shape in matrices.items()
    }
    tensors |= {each: (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32) for each in vectors}
    if drafts < vocabulary:
        drafted = np.sort(rng.choice(vocabulary, drafts, replace=False))
        tensors["d2t"] = drafted.astype(np.int64) - np.arange(len(drafted))
        tensors["t2d"] = np.isin(np.arange(vocabulary), drafted)
    return tensors


def _scale(name: str) -> float:
    """Large where a layer adds to what it reads: or else all drafts of a text would be the same."""
    return 5.0 if name.endswith(("o_proj", "down_proj")) else 1.5


def write(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """A safetensors file."""
    names = {"float32": "F32", "int64": "I64", "bool": "BOOL"}
    header, body = dict[str, Any](), b""
    for name, array in tensors.items():
        content = array.tobytes()
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        body += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
