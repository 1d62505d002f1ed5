"""A checkpoint in llama.cpp's format, float32, for a comparison on the same numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from engine.errors import ConfigurationError
from engine.models.model_config import read_model_config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""llama.cpp's, by Hugging Face's, without the layer and ``.weight``."""


def write_gguf(directory: Path, path: Path) -> None:
    """Write the Llama of a Hugging Face directory. A token's text is its number: prompts are token ids.

    Raises ImportError without the package gguf, and ConfigurationError for another family.
    """
    import gguf

    family = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    spec = read_model_config(directory)
    attention, feed_forward = spec.blocks[0].mixer, spec.blocks[0].feed_forward
    if family != "llama" or attention.rope is None or attention.rope.scaling != "default":
        raise ConfigurationError(f"llama.cpp is compared on Llamas without scaled positions, and {directory} is none")
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(spec.max_position)
    file.add_embedding_length(spec.hidden_size)
    file.add_block_count(len(spec.blocks))
    file.add_feed_forward_length(feed_forward.intermediate_size)
    file.add_head_count(attention.num_heads)
    file.add_head_count_kv(attention.num_kv_heads)
    file.add_layer_norm_rms_eps(spec.rms_norm_eps)
    file.add_rope_freq_base(attention.rope.theta)
    file.add_rope_dimension_count(attention.head_dim)
    file.add_key_length(attention.head_dim)
    file.add_value_length(attention.head_dim)
    file.add_vocab_size(spec.vocab_size)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([f"<{number}>" for number in range(spec.vocab_size)])
    file.add_token_types([gguf.TokenType.USER_DEFINED] * spec.vocab_size)
    file.add_token_merges(["a b"])
    file.add_eos_token_id(min(spec.eos_token_ids))
    file.add_add_bos_token(False)
    heads = {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}
    for name, tensor in _tensors(directory):
        short = name.removesuffix(".weight").rpartition(".")[2]
        file.add_tensor(name, interleaved(tensor, heads[short]) if short in heads else tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def interleaved(kernel: np.ndarray, heads: int) -> np.ndarray:
    """[heads * width, in] with each head's halves, which are rotated together, turned into pairs of neighbours."""
    halves = kernel.reshape(heads, 2, -1, kernel.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(kernel.shape)


def _tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names, and arrays in float32."""
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            yield _name(name.removesuffix(".weight")), np.asarray(tensor, np.float32)


def _name(name: str) -> str:
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight"
