"""Writes a trained decoder as a Hugging Face directory in the Llama layout."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from safetensors.numpy import save

from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.models.layers.feed_forward import GatedMLP, GatedSpec
from engine.models.layers.norm import RMSNorm
from engine.models.layers.self_attention import SelfAttention, self_attention
from engine.models.spec import ModelSpec
from engine.models.weights.forms import Weight

Tensors = dict[str, NDArray[np.float32]]


def export_model(model: Decoder, directory: Path, generation: dict[str, object], dtype: str = "float32") -> None:
    """config.json, generation_config.json and model.safetensors, its weights in that dtype.

    ``generation`` are the defaults of requests.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", llama_config(model.partition.model, dtype))
    eos = model.partition.model.eos_token_ids[0]
    _write_json(directory / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos, **generation})
    stored = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in llama_tensors(model).items()}
    (directory / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))


def llama_config(model: ModelSpec, dtype: str) -> dict[str, object]:
    """config.json as LlamaForCausalLM reads it."""
    attention, feed_forward = self_attention(model.blocks[0]), model.blocks[0].feed_forward
    assert isinstance(feed_forward, GatedSpec)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": model.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": model.eos_token_ids[0],
        "pad_token_id": model.eos_token_ids[0],
        "torch_dtype": dtype,
    }


def llama_tensors(model: Decoder) -> Tensors:
    """The weights under their Llama names, each linear one as [out, in]; the tied head is left out."""
    tensors = {
        "model.embed_tokens.weight": _numbers(model.embedding),
        "model.norm.weight": _scale(model.norm),
    }
    for index, layer in enumerate(model.layers):
        named = {f"model.layers.{index}.{name}.weight": tensor for name, tensor in _layer_tensors(layer).items()}
        tensors |= named
    return tensors


def _layer_tensors(layer: DecoderLayer) -> Tensors:
    assert isinstance(layer.mlp, GatedMLP) and isinstance(layer.mixer, SelfAttention)
    qkv, gate_up = _numbers(layer.mixer.qkv_kernel), _numbers(layer.mlp.gate_up_kernel)
    return {
        "input_layernorm": _scale(layer.attention_norm),
        "self_attn.q_proj": _linear(qkv[:, :, :-2]),
        "self_attn.k_proj": _linear(qkv[:, :, -2]),
        "self_attn.v_proj": _linear(qkv[:, :, -1]),
        "self_attn.o_proj": _linear(_numbers(layer.mixer.o_kernel)),
        "post_attention_layernorm": _scale(layer.mlp_norm),
        "mlp.gate_proj": _linear(gate_up[:, 0]),
        "mlp.up_proj": _linear(gate_up[:, 1]),
        "mlp.down_proj": _linear(_numbers(layer.mlp.down_kernel)),
    }


def _numbers(param: nnx.Param[Weight]) -> NDArray[np.float32]:
    return np.asarray(param.get_value().values)


def _scale(norm: RMSNorm | None) -> NDArray[np.float32]:
    assert norm is not None
    return np.asarray(norm.scale[...])


def _linear(kernel: NDArray[np.float32]) -> NDArray[np.float32]:
    """f[in, ...] as f[out, in]."""
    return np.ascontiguousarray(kernel.reshape(kernel.shape[0], -1).T)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
