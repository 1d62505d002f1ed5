"""Writes a trained decoder as a Hugging Face directory in the Llama layout."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer

Tensors = dict[str, NDArray[np.float32]]


def export_model(model: Decoder, directory: Path) -> None:
    """config.json, generation_config.json and model.safetensors, in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", llama_config(model.config))
    eos = model.config.eos_token_ids[0]
    _write_json(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    weights = save(llama_tensors(model), metadata={"format": "pt"})
    (directory / "model.safetensors").write_bytes(weights)


def llama_config(config: ModelConfig) -> dict[str, object]:
    """config.json as LlamaForCausalLM reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
        "torch_dtype": "float32",
    }


def llama_tensors(model: Decoder) -> Tensors:
    """The weights under their Llama names, each linear one as [out, in]; the tied head is left out."""
    tensors = {
        "model.embed_tokens.weight": np.asarray(model.embedding[...]),
        "model.norm.weight": np.asarray(model.norm.scale[...]),
    }
    for index, layer in enumerate(model.layers):
        named = {f"model.layers.{index}.{name}.weight": tensor for name, tensor in _layer_tensors(layer).items()}
        tensors |= named
    return tensors


def _layer_tensors(layer: DecoderLayer) -> Tensors:
    qkv = np.asarray(layer.attention.qkv_kernel[...])
    gate_up = np.asarray(layer.mlp.gate_up_kernel[...])
    return {
        "input_layernorm": np.asarray(layer.attention_norm.scale[...]),
        "self_attn.q_proj": _linear(qkv[:, :, :-2]),
        "self_attn.k_proj": _linear(qkv[:, :, -2]),
        "self_attn.v_proj": _linear(qkv[:, :, -1]),
        "self_attn.o_proj": _linear(np.asarray(layer.attention.o_kernel[...])),
        "post_attention_layernorm": np.asarray(layer.mlp_norm.scale[...]),
        "mlp.gate_proj": _linear(gate_up[:, 0]),
        "mlp.up_proj": _linear(gate_up[:, 1]),
        "mlp.down_proj": _linear(np.asarray(layer.mlp.down_kernel[...])),
    }


def _linear(kernel: NDArray[np.float32]) -> NDArray[np.float32]:
    """f[in, ...] as f[out, in]."""
    return np.ascontiguousarray(kernel.reshape(kernel.shape[0], -1).T)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
