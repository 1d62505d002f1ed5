"""Tiny Hugging Face checkpoints with random weights, the same on every machine: numpy and nothing else."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

SIZES = {
    "vocab_size": 144,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, **SIZES}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    **SIZES,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 8.0,
    "sliding_window": 8,
    "num_hidden_layers": 4,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    **SIZES,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Variant:
    """One checkpoint: its config.json, how it is stored, and a seed under which its greedy paths are clear-cut."""

    config: dict[str, Any]
    seed: int = 0
    files: int = 1
    stored: str = "float32"
    generation: dict[str, Any] = field(default_factory=lambda: {"eos_token_id": [2, 3]})


VARIANTS = {
    "llama2": Variant({**LLAMA, "num_key_value_heads": 4, "torch_dtype": "float32"}, seed=3),
    "llama2_bfloat16": Variant(
        {**LLAMA, "num_key_value_heads": 4, "torch_dtype": "bfloat16"}, seed=5, stored="bfloat16"
    ),
    "llama3": Variant(
        {
            **LLAMA,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE},
        },
        seed=1,
    ),
    "llama_linear": Variant(
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
        seed=6,
    ),
    "mistral": Variant(
        {**MISTRAL, "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        seed=2,
    ),
    "qwen2": Variant({**QWEN2, "tie_word_embeddings": True, "use_sliding_window": False, "rope_theta": 1000.0}, seed=2),
    "qwen2_sliding": Variant(
        {
            **QWEN2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "dtype": "float32",
        },
        seed=9,
    ),
    "qwen3": Variant({**QWEN3, "rope_theta": 1000.0}, seed=5),
    "qwen3_sharded": Variant(
        {
            **QWEN3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        seed=19,
        files=3,
    ),
    "gemma2": Variant({**GEMMA2, "rope_theta": 1000.0}, seed=110),
    "mixtral": Variant({**MIXTRAL, "rope_theta": 1000.0}, seed=2),
}
"""Each family, tied and untied, in the config styles of transformers 4 and 5; several windows are shorter than a prompt."""


def build_checkpoint(
    directory: Path,
    variant: str = "llama2",
    *,
    files: int | None = None,
    stored: str | None = None,
    seed: int | None = None,
    **overrides: Any,
) -> Path:
    """Writes a model directory and returns it; ``overrides`` are keys of config.json, ``stored`` the dtype on disk."""
    chosen = VARIANTS[variant]
    config = {**chosen.config, **overrides}
    tensors = random_tensors(config, chosen.seed if seed is None else seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(chosen.generation, indent=2))
    write_tensors(directory, tensors, files=files or chosen.files, stored=stored or chosen.stored)
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> Tensors:
    """The tensors that config.json calls for, under the names transformers gives them."""
    rng = np.random.default_rng(seed)
    shapes, scale = _shapes(config), _gemma_scale if config["model_type"] == "gemma2" else lambda name: 1.0
    return {name: _random(rng, name, shape, scale(name)).astype(np.float32) for name, shape in shapes.items()}


def write_tensors(directory: Path, tensors: Tensors, *, files: int = 1, stored: str = "float32") -> None:
    """Writes model.safetensors, or so many shards and their index."""
    if files == 1:
        _write_safetensors(directory / "model.safetensors", tensors, stored)
        return
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        shard = {name: tensors[name] for name in names[number::files]}
        _write_safetensors(directory / file, shard, stored)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(4 * array.size for array in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocabulary, hidden, ffn = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, config.get("attention_bias", False)),
    }
    if config["model_type"] == "mixtral":
        linears["block_sparse_moe.gate"] = (config["num_local_experts"], hidden, False)
        for expert in range(config["num_local_experts"]):
            linears |= {f"block_sparse_moe.experts.{expert}.{name}": (ffn, hidden, False) for name in ("w1", "w3")}
            linears[f"block_sparse_moe.experts.{expert}.w2"] = (hidden, ffn, False)
    else:
        linears |= {f"mlp.{name}_proj": (ffn, hidden, config.get("mlp_bias", False)) for name in ("gate", "up")}
        linears["mlp.down_proj"] = (hidden, ffn, config.get("mlp_bias", False))
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "gemma2":
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (outputs, inputs, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", config["model_type"] == "gemma2"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _gemma_scale(name: str) -> float:
    """Stored less 1. What layers add is made large beside embeddings that are multiplied by the root of their size."""
    return next(
        (scale for norm, scale in {".post_feedforward": 6.0, ".post_attention": 3.0}.items() if norm in name), 0.0
    )


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], scale: float) -> NDArray[np.float64]:
    """Large enough that attention is far from even and the next token far from certain or constant.

    ``scale`` is the mean of a norm's.
    """
    noise = rng.standard_normal(shape)
    if "norm" in name:
        return scale + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed" in name or "lm_head" in name:
        return 0.4 * noise
    return 1.7 * noise / shape[1] ** 0.5


def _write_safetensors(path: Path, tensors: Tensors, stored: str) -> None:
    """The format is a length, a JSON header that names, shapes and places the tensors, and their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in tensors.items():
        dtype, content = _encode(array, stored)
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def _encode(array: NDArray[np.float32], stored: str) -> tuple[str, bytes]:
    if stored == "bfloat16":
        return "BF16", (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return {"float32": "F32", "float16": "F16", "int8": "I8"}[stored], array.astype(stored).tobytes()
