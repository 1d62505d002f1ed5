"""Tiny Hugging Face checkpoints with random weights, the same on every machine: numpy and nothing else."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from moe_checkpoints import MISTRAL4, MOE_VARIANTS, QWEN3_VL_MOE, attention_shapes, has_experts, moe_shapes
from numpy.typing import NDArray
from position_checkpoints import POSITION_VARIANTS, has_position_table, position_shapes
from state_checkpoints import STATE_VARIANTS, has_states, norm_scale, state_shapes

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
GEMMAS = ("gemma2", "gemma3_text")
"""Those with norms before and after."""
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    **SIZES,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
GEMMA3 = {
    **GEMMA2,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    **SIZES,
    "pad_token_id": 0,
    "hidden_size": 64,
    "sliding_window": 24,
}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "head_dim": 16, **SIZES}
OLMO3 = {**OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 8}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "head_dim": 16, "pad_token_id": 0, **SIZES}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "head_dim": 16,
    **SIZES,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
GEMMA = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **SIZES, "head_dim": 16, "hidden_act": "gelu"}
ERNIE = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", **SIZES, "head_dim": 16, "use_bias": False}
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    **SIZES,
    "head_dim": 16,
    "sliding_window": 8,
}
GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16, "pad_token_id": 0, **SIZES}
MINISTRAL3 = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 16, **SIZES}
SEED_OSS = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 16, **SIZES}
ARCEE = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "head_dim": 16, **SIZES, "hidden_act": "relu2"}
HYPERCLOVAX = {
    **GRANITE,
    "architectures": ["HyperCLOVAXForCausalLM"],
    "model_type": "hyperclovax",
    "attention_multiplier": None,
    "logits_scaling": 2.0,
}
YOUTU = {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
CWM = {"architectures": ["CwmForCausalLM"], "model_type": "cwm", "head_dim": 16, **SIZES, "sliding_window": 8}
VAULTGEMMA = {**GEMMA2, "architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"}
HELIUM = {"architectures": ["HeliumForCausalLM"], "model_type": "helium", **SIZES, "hidden_size": 64, "head_dim": 16}
APERTUS = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "head_dim": 16,
    **SIZES,
    "hidden_act": "xielu",
}
HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "head_dim": 16,
    **SIZES,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "dynamic", "alpha": 10.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    **SIZES,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "sliding_window": 8,
}
STABLELM = {
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    **SIZES,
    "hidden_size": 64,
    "num_key_value_heads": 1,
    "use_qkv_bias": True,
    "use_parallel_residual": True,
    "qk_layernorm": True,
}
OLMO = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "head_dim": 16, **SIZES, "pad_token_id": 0}
PHI = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    **SIZES,
    "hidden_size": 64,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
}
GPT_NEOX = {
    **PHI,
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
}
NEMOTRON = {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    **SIZES,
    "head_dim": 16,
    "hidden_act": "relu2",
}
GRANITE_SWA = {
    **GRANITE,
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "num_hidden_layers": 5,
    "sliding_window": 8,
    "layer_rope_theta": [0, 100.0, 1000.0, 100.0, 1000.0],
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    **SIZES,
    "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 144,
    "tie_word_embeddings": False,
}
WITH_NORM_BIAS = ("gpt_neox", "nemotron", "phi", "stablelm", "starcoder2")
NAMES = {
    "gpt_neox": ("gpt_neox", "embed_in", "final_layer_norm", "embed_out"),
    "phi": ("model", "embed_tokens", "final_layernorm", "lm_head"),
}
"""What the body, the embedding, the last norm and the head are called, if it is not as in Llama."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 48}
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
    "llama_yarn": Variant({**LLAMA, "rope_theta": 1000.0, "rope_scaling": YARN, "hidden_act": "gelu"}),
    "llama_dynamic": Variant(
        {**LLAMA, "rope_theta": 1000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, seed=2
    ),
    "gemma3": Variant(
        {
            **GEMMA3,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 3,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        }
    ),
    "gemma3_vision": Variant(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                **GEMMA3,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            "tie_word_embeddings": False,
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 28},
            "torch_dtype": "float32",
        }
    ),
    "phi3": Variant(
        {
            **PHI3,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0],
                "long_factor": [9.0] * 6,
            },
            "original_max_position_embeddings": 56,
        },
        seed=1,
    ),
    "phi3_long": Variant(
        {
            **PHI3,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "attention_factor": 1.2,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0, 1.1, 1.3, 1.4, 1.7, 2.0, 3.0, 4.0],
            },
            "original_max_position_embeddings": 1,
        },
        seed=1,
    ),
    "olmo": Variant({**OLMO, "clip_qkv": 1.5, "rope_theta": 1000.0}, seed=0),
    "olmo2": Variant({**OLMO2, "num_key_value_heads": 4, "rope_theta": 1000.0}, seed=2),
    "olmo3": Variant({**OLMO3, "num_hidden_layers": 5, "rope_scaling": {**YARN, "attention_factor": 1.2}}),
    "smollm3": Variant({**SMOLLM3, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "rope_theta": 1000.0}, seed=2),
    "granite": Variant({**GRANITE, "rope_theta": 1000.0}, seed=4),
    "glm4": Variant({**GLM4, "rope_theta": 1000.0}, seed=3),
    "ministral3": Variant(
        {
            **MINISTRAL3,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1000.0,
                "llama_4_scaling_beta": 0.4,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        }
    ),
    "mistral_vision": Variant(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": {**MISTRAL, "sliding_window": None, "head_dim": 16, "rope_theta": 1000.0},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 28, "head_dim": 16},
        },
        seed=2,
    ),
    "mistral4": Variant(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": {**SIZES, **MISTRAL4},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 28, "head_dim": 16},
        },
        seed=6,
    ),
    "qwen2_5_vl": Variant(
        {
            **QWEN2,
            "hidden_size": 64,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "rope_theta": 1000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
            "vision_config": {**QWEN_TOWER, "out_hidden_size": 64},
        },
        seed=1,
    ),
    "qwen3_vl_moe": Variant(
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "model_type": "qwen3_vl_moe",
            "text_config": {
                **SIZES,
                **QWEN3_VL_MOE,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2]},
            },
            "tie_word_embeddings": False,
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        },
        seed=6,
    ),
    "gemma4": Variant({**GEMMA4, "final_logit_softcapping": 20.0}, seed=2),
    "gemma4_unified": Variant(
        {
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified",
            "text_config": {
                **{key: value for key, value in GEMMA4.items() if key != "architectures"},
                "model_type": "gemma4_unified_text",
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            "tie_word_embeddings": False,
            "vision_config": {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 4},
            "audio_config": {"audio_embed_dim": 8},
        },
        seed=2,
    ),
    "seed_oss": Variant({**SEED_OSS, "attention_out_bias": True, "rope_theta": 1000.0}, seed=2),
    "gemma": Variant({**GEMMA, "rope_theta": 1000.0, "tie_word_embeddings": False}),
    "ernie4_5": Variant({**ERNIE, "rope_theta": 1000.0}, seed=5),
    "arcee": Variant({**ARCEE, "mlp_bias": True, "rope_theta": 1000.0}, seed=2),
    "hyperclovax": Variant({**HYPERCLOVAX, "rope_theta": 1000.0}, seed=3),
    "youtu": Variant({**YOUTU, "tie_word_embeddings": False, "rope_theta": 1000.0}, seed=0),
    "cwm": Variant(
        {**CWM, "num_hidden_layers": 5, "rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        seed=1,
    ),
    "vaultgemma": Variant({**VAULTGEMMA, "rope_theta": 1000.0, "tie_word_embeddings": False}, seed=1),
    "helium": Variant({**HELIUM, "attention_bias": True, "rope_theta": 1000.0}, seed=7),
    "apertus": Variant(
        {**APERTUS, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}, "rope_theta": 500.0}, seed=21
    ),
    "hunyuan_dense": Variant(HUNYUAN, seed=26),
    "starcoder2": Variant({**STARCODER2, "rope_theta": 1000.0, "tie_word_embeddings": False}, seed=3),
    "stablelm": Variant({**STABLELM, "rope_theta": 1000.0}, seed=6),
    "phi": Variant({**PHI, "rope_theta": 1000.0}, seed=10),
    "gpt_neox": Variant({**GPT_NEOX, "rotary_pct": 0.5, "rotary_emb_base": 1000}, seed=8),
    "nemotron": Variant({**NEMOTRON, "rope_theta": 1000.0}, seed=2),
    "granite_swa": Variant({**GRANITE_SWA, "tie_word_embeddings": False}, seed=5),
    "exaone4": Variant({**EXAONE4, "num_hidden_layers": 4, "sliding_window_pattern": 2, "rope_theta": 1000.0}, seed=3),
    **{
        name: Variant({**SIZES, **config}, seed=seed)
        for name, (seed, config) in (MOE_VARIANTS | STATE_VARIANTS).items()
    },
    **{name: Variant(config, seed=seed) for name, (seed, config) in POSITION_VARIANTS.items()},
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
    """The tensors that config.json calls for, under the names transformers gives them.

    Those of a text model beside a vision tower have the names that version 4 gave them, or those of Qwen.
    """
    if "vision_config" in config:
        own = config.get("text_config") or {key: value for key, value in config.items() if key != "vision_config"}
        return _beside_a_tower(config["model_type"], random_tensors(own, seed))
    rng = np.random.default_rng(seed)
    if has_states(config):
        shapes = state_shapes(config)
    elif has_position_table(config):
        shapes = position_shapes(config)
    else:
        shapes = moe_shapes(config) if has_experts(config) else _shapes(config)
    scale = _gemma_scale if config["model_type"] in GEMMAS else partial(norm_scale, config)
    return {name: _random(rng, name, shape, scale(name)).astype(np.float32) for name, shape in shapes.items()}


def _beside_a_tower(family: str, stored: Tensors) -> Tensors:
    tower = np.ones(TOWER["hidden_size"], np.float32)
    if family == "gemma4_unified":
        text = {name.replace("model.", "model.language_model."): tensor for name, tensor in stored.items()}
        return text | {"model.vision_embedder.pos_norm.weight": tower}
    if family == "qwen2_5_vl":
        return stored | {"visual.merger.ln_q.weight": tower}
    if family == "qwen3_vl_moe":
        text = {name.replace("model.", "model.language_model."): tensor for name, tensor in stored.items()}
        return text | {"model.visual.merger.norm.weight": tower}
    text = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    return text | {"vision_tower.post_layernorm.weight": tower}


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
    family = config["model_type"]
    bias = config.get("attention_bias", family in ("glm4", "phi", "seed_oss", "starcoder2"))
    qkv_bias = bias or family in ("qwen2", "qwen2_5_vl", "stablelm")
    output_bias = {"glm4": False, "helium": False, "seed_oss": config.get("attention_out_bias", False)}.get(
        family, bias
    )
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, output_bias),
    }
    if family == "phi3":
        linears = {"self_attn.qkv_proj": (q + 2 * kv, hidden, False), "self_attn.o_proj": (hidden, q, False)}
    if family == "mixtral":
        linears["block_sparse_moe.gate"] = (config["num_local_experts"], hidden, False)
        for expert in range(config["num_local_experts"]):
            linears |= {f"block_sparse_moe.experts.{expert}.{name}": (ffn, hidden, False) for name in ("w1", "w3")}
            linears[f"block_sparse_moe.experts.{expert}.w2"] = (hidden, ffn, False)
    elif family == "phi":
        linears["self_attn.dense"] = linears.pop("self_attn.o_proj")
        linears |= {"mlp.fc1": (ffn, hidden, True), "mlp.fc2": (hidden, ffn, True)}
    elif family == "gpt_neox":
        linears = {"attention.query_key_value": (3 * q, hidden, True), "attention.dense": (hidden, q, True)}
        linears |= {"mlp.dense_h_to_4h": (ffn, hidden, True), "mlp.dense_4h_to_h": (hidden, ffn, True)}
    elif family == "starcoder2":
        linears |= {"mlp.c_fc": (ffn, hidden, True), "mlp.c_proj": (hidden, ffn, True)}
    elif family in ("phi3", "glm4"):
        linears |= {"mlp.gate_up_proj": (2 * ffn, hidden, False), "mlp.down_proj": (hidden, ffn, False)}
    else:
        parts = ("up",) if family in ("apertus", "arcee", "nemotron") else ("gate", "up")
        linears |= {f"mlp.{name}_proj": (ffn, hidden, config.get("mlp_bias", False)) for name in parts}
        linears["mlp.down_proj"] = (hidden, ffn, config.get("mlp_bias", False))
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family == "olmo":
        norms = {}
    if family in ("phi", "stablelm"):
        norms = {"input_layernorm": hidden}
    if family == "youtu":
        linears, norms = {name: shape for name, shape in linears.items() if name.startswith("mlp.")}, {}
    if family == "vaultgemma":
        norms = {"input_layernorm": hidden, "pre_feedforward_layernorm": hidden}
    if family in GEMMAS:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if family == "apertus":
        norms = {"attention_layernorm": hidden, "feedforward_layernorm": hidden}
    if family == "hunyuan_v1_dense":
        norms |= {"self_attn.query_layernorm": head_dim, "self_attn.key_layernorm": head_dim}
    if family in ("apertus", "qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    if family == "glm4":
        norms |= {"post_self_attn_layernorm": hidden, "post_mlp_layernorm": hidden}
    if family == "hyperclovax":
        norms |= {"post_norm1": hidden, "post_norm2": hidden}
    if family in ("olmo2", "olmo3", "exaone4"):
        norms = {"post_attention_layernorm": hidden, "post_feedforward_layernorm": hidden}
        sizes = (head_dim, head_dim) if family == "exaone4" else (q, kv)
        norms |= {"self_attn.q_norm": sizes[0], "self_attn.k_norm": sizes[1]}
    body, embedding, norm, head = NAMES.get(family, ("model", "embed_tokens", "norm", "lm_head"))
    shapes: dict[str, tuple[int, ...]] = {f"{body}.{embedding}.weight": (vocabulary, hidden)}
    if family in ("gemma4_text", "gemma4_unified_text"):
        return shapes | _gemma4_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"{body}.layers.{layer}"
        if family == "youtu":
            own = attention_shapes(config, layer)
            shapes |= {f"{prefix}.{name}": shape for name, shape in own.items()}
        for name, (outputs, inputs, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
        if family == "stablelm":
            heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
            for part, count in heads.items():
                names = (f"{prefix}.self_attn.{part}_layernorm.norms.{head}.weight" for head in range(count))
                shapes |= dict.fromkeys(names, (head_dim,))
        if family == "granite_swa":
            shapes[f"{prefix}.self_attn.sinks"] = (config["num_attention_heads"],)
        if family in WITH_NORM_BIAS:
            shapes |= {f"{prefix}.{name}.bias": (size,) for name, size in norms.items()}
        if family == "apertus":
            numbers = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            shapes |= {f"{prefix}.mlp.act_fn.{name}": shape for name, shape in numbers.items()}
    if family != "olmo":
        shapes[f"{body}.{norm}.weight"] = (hidden,)
    if family in WITH_NORM_BIAS:
        shapes[f"{body}.{norm}.bias"] = (hidden,)
    if family == "phi":
        shapes["lm_head.bias"] = (vocabulary,)
    if not config.get("tie_word_embeddings", family in (*GEMMAS, "smollm3", "ernie4_5", "vaultgemma", "youtu")):
        shapes[f"{head}.weight"] = (vocabulary, hidden)
    if family == "gpt_neox":  # the masks that Pythia's checkpoints have, and nothing reads
        for layer in range(config["num_hidden_layers"]):
            shapes |= {f"{body}.layers.{layer}.attention.bias": (1, 1, 64, 64)}
            shapes |= {f"{body}.layers.{layer}.attention.masked_bias": ()}
    return shapes


def _gemma4_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, own, layers = config["hidden_size"], config["hidden_size_per_layer_input"], config["num_hidden_layers"]
    has_own = config["model_type"] == "gemma4_text"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens_per_layer.weight": (config["vocab_size"], layers * own),
        "model.per_layer_model_projection.weight": (layers * own, hidden),
        "model.per_layer_projection_norm.weight": (own,),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer, layer_type in enumerate(config["layer_types"]):
        prefix, shared = f"model.layers.{layer}.", layer >= layers - config["num_kv_shared_layers"]
        head_dim = config["global_head_dim" if layer_type == "full_attention" else "head_dim"]
        ffn = config["intermediate_size"] * (2 if shared else 1)
        few = layer_type == "full_attention" and config.get("attention_k_eq_v")
        kv_heads = config["num_global_key_value_heads" if few else "num_key_value_heads"]
        heads = {"q": config["num_attention_heads"]} | ({} if shared else dict.fromkeys("k" if few else "kv", kv_heads))
        for name, count in heads.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (count * head_dim, hidden)
        for name in [*heads][:2]:
            shapes[f"{prefix}self_attn.{name}_norm.weight"] = (head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, config["num_attention_heads"] * head_dim)
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{prefix}per_layer_input_gate.weight"] = (own, hidden)
        shapes[f"{prefix}per_layer_projection.weight"] = (hidden, own)
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in (*norms, "post_per_layer_input_norm")}
        shapes[f"{prefix}layer_scalar"] = (1,)
    return {name: shape for name, shape in shapes.items() if has_own or "per_layer" not in name}


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
    if name.endswith(("norm.bias", "ln_1.bias", "ln_2.bias", "ln_f.bias")):
        return 0.3 * noise
    if "norm" in name or ".ln_" in f".{name}" or name.endswith(("layer_scalar", "scale")):
        return scale + 0.2 * noise
    if name.endswith(("sinks", "A_log", ".D", "alpha_p", "alpha_n", "beta")):
        return noise
    if name.endswith("eps"):
        return np.full(shape, -1e-6)
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith(("wpe.weight", "embed_positions.weight")):
        return noise
    if any(table in name for table in ("embed", "lm_head", "wte")):
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
