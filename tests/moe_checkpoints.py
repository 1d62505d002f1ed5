"""Tiny models with experts: their config.json, and the tensors that published checkpoints of the family have."""

from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "rope_theta": 1000.0,
}
MELLUM = {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
HY_V3 = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "rope_theta": 1000.0,
}
HUNYUAN_MOE = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "head_dim": 16,
    "intermediate_size": 24,
    "num_experts": 5,
    "moe_topk": [2, 3, 2],
    "rope_theta": 100.0,
    "rope_scaling": {"type": "dynamic", "alpha": 10.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
COHERE2_MOE = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "head_dim": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 40,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "rms_norm_eps": None,
    "expert_selection_fn": "sigmoid",
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "rope_theta": 1000.0,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 1.5,
    "rope_theta": 1000.0,
    "rope_scaling": {**YARN, "truncate": False},
}
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_theta": 1000.0,
}
SOLAR_OPEN = {
    **GLM4_MOE,
    "architectures": ["SolarOpenForCausalLM"],
    "model_type": "solar_open",
    "first_k_dense_replace": 0,
    "attention_bias": True,
    "rope_scaling": YARN,
}
MIMO_V2 = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "sliding_window_size": 7,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}
GRANITE_MOE = {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
    "rope_theta": 1000.0,
}
GRANITE_MOE_SWA = {
    **GRANITE_MOE,
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "model_type": "granitemoe_swa",
    "shared_intermediate_size": 40,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "layer_rope_theta": [0, 1000.0, 100.0],
}
PHIMOE = {
    "architectures": ["PhimoeForCausalLM"],
    "model_type": "phimoe",
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "router_jitter_noise": 0.3,
    "attention_bias": True,
    "lm_head_bias": True,
    "sliding_window": 8,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        "short_mscale": 1.2,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 64,
    },
}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "attn_scale": 0.4,
    "no_rope_layer_interval": 3,
    "num_hidden_layers": 5,
    "pad_token_id": 0,
    "rope_theta": 1000.0,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 1000.0,
}
GEMMA4_MOE = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": False,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 1000.0,
}
DOTS1 = {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rope_theta": 1000.0,
}
EXAONE_MOE = {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 4,
    "rope_theta": 1000.0,
}
AFMOE = {
    "architectures": ["AfmoeForCausalLM"],
    "model_type": "afmoe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "route_scale": 1.5,
    "sliding_window": 8,
    "global_attn_every_n_layers": 2,
    "num_hidden_layers": 4,
    "mup_enabled": True,
    "rope_theta": 1000.0,
}
ERNIE_MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "head_dim": 16,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": True,
    "rope_theta": 1000.0,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
GLM4_MOE_LITE = {
    **DEEPSEEK_V3,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
    "routed_scaling_factor": 1.8,
}
MISTRAL4 = {
    **DEEPSEEK_V3,
    "model_type": "mistral4",
    "first_k_dense_replace": 0,
    "rope_scaling": None,
    "rope_parameters": {
        **YARN,
        "rope_theta": 1000.0,
        "llama_4_scaling_beta": 0.4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
QWEN3_VL_MOE = {**QWEN3_MOE, "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 16}
"""Both are published beside a vision tower."""
AXK1 = {**DEEPSEEK_V3, "architectures": ["AXK1ForCausalLM"], "model_type": "axk1"}

MOE_VARIANTS: dict[str, tuple[int, Config]] = {
    "qwen3_moe": (9, {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe_plain": (
        12,
        {
            **QWEN3_MOE,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "hidden_act": "gelu",
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "mellum": (5, MELLUM),
    "hy_v3": (3, HY_V3),
    "hunyuan_moe": (2, HUNYUAN_MOE),
    "cohere2_moe": (11, COHERE2_MOE),
    "granite_moe_swa": (4, GRANITE_MOE_SWA),
    "mimo_v2": (2, MIMO_V2),
    "phimoe": (1, PHIMOE),
    "qwen2_moe": (4, {**QWEN2_MOE, "mlp_only_layers": [1]}),
    "gpt_oss": (1, GPT_OSS),
    "glm4_moe": (
        0,
        {
            **GLM4_MOE,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe_plain": (0, {**GLM4_MOE, "norm_topk_prob": False, "partial_rotary_factor": 0.25}),
    "solar_open": (4, SOLAR_OPEN),
    "granite_moe": (3, GRANITE_MOE),
    "granite_moe_shared": (
        9,
        {
            **GRANITE_MOE,
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": 40,
            "tie_word_embeddings": True,
        },
    ),
    "llama4": (2, LLAMA4),
    "llama4_interleaved": (
        1,
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "minimax_m2": (3, MINIMAX_M2),
    "gemma4_moe": (6, GEMMA4_MOE),
    "olmoe": (14, OLMOE),
    "dots1": (5, DOTS1),
    "exaone_moe": (6, EXAONE_MOE),
    "afmoe": (6, AFMOE),
    "ernie4_5_moe": (0, ERNIE_MOE),
    "axk1": (0, AXK1),
    "deepseek_v2": (9, DEEPSEEK_V2),
    "deepseek_v2_lite": (
        0,
        {
            **DEEPSEEK_V2,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": None,
        },
    ),
    "deepseek_v3": (4, DEEPSEEK_V3),
    "deepseek_v3_plain": (
        5,
        {
            **DEEPSEEK_V3,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    "glm4_moe_lite": (
        0,
        {**GLM4_MOE_LITE, "num_hidden_layers": 4, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
}
"""By name, a seed under which greedy paths and routes are clear-cut, and the keys beside the common sizes."""


def has_experts(config: Config) -> bool:
    """Whether ``moe_shapes`` knows the model's tensors."""
    return config["model_type"] != "mixtral" and any(key in config for key in EXPERTS)


def moe_shapes(config: Config) -> Shapes:
    """The tensors of a model with experts, under their published names."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    if config["model_type"] == "phimoe":
        shapes |= {"model.norm.bias": (hidden,), "lm_head.bias": (vocabulary,)}
    for layer in range(config["num_hidden_layers"]):
        own = {**attention_shapes(config, layer), **dict(feed_forward_shapes(config, layer))}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def attention_shapes(config: Config, layer: int) -> Shapes:
    """The tensors of a layer's attention and norms."""
    family, hidden = config["model_type"], config["hidden_size"]
    if "kv_lora_rank" in config:
        return _latent_attention(config)
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    if family == "gemma4_text" and config["layer_types"][layer] == "full_attention":
        head_dim = config["global_head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    values, output = kv, q
    if family == "mimo_v2_flash":
        kv *= 1 + (config["layer_types"][layer] == "sliding_attention")
        values, output = kv // head_dim * config["v_head_dim"], config["num_attention_heads"] * config["v_head_dim"]
    qkv_bias = config.get("attention_bias", family in ("qwen2_moe", "gpt_oss"))
    output_bias = qkv_bias and family not in ("qwen2_moe", "glm4_moe", "solar_open")
    shapes: Shapes = {}
    gates = q if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else 0
    for name, size, bias in (("q", q + gates, qkv_bias), ("k", kv, qkv_bias), ("v", values, qkv_bias)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
        if bias:
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    shapes["self_attn.o_proj.weight"] = (hidden, output)
    if output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if family == "hunyuan_v1_moe":
        shapes |= {f"self_attn.{name}_layernorm.weight": (head_dim,) for name in ("query", "key")}
    if family.startswith(("qwen3_", "hy_v3", "dots1", "exaone_moe", "afmoe", "mellum", "gemma4_text", "lfm3")) or (
        config.get("use_qk_norm") and family == "glm4_moe"
    ):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if family in ("minimax_m2", "olmo_hybrid", "olmoe"):
        shapes |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    if family in ("gpt_oss", "granitemoe_swa"):
        shapes["self_attn.sinks"] = (config["num_attention_heads"],)
    if family == "mimo_v2_flash" and config["layer_types"][layer] == "sliding_attention":
        shapes["self_attn.attention_sink_bias"] = (config["num_attention_heads"],)
    norms = ["input_layernorm", "post_attention_layernorm"][: 1 if family == "cohere2_moe" else 2]
    if family == "afmoe":
        shapes["self_attn.gate_proj.weight"] = (q, hidden)
        norms += ["pre_mlp_layernorm", "post_mlp_layernorm"]
    if family == "gemma4_text":
        shapes["layer_scalar"] = (1,)
        names = ("post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        norms += ["pre_feedforward_layernorm", "pre_feedforward_layernorm_2", *names]
    if family == "phimoe":
        shapes |= {f"{name}.bias": (hidden,) for name in norms}
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def _latent_attention(config: Config) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, values = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    linears = {
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_b_proj": (heads * (nope + values), rank),
        "o_proj": (hidden, heads * values),
    }
    norms = {"self_attn.kv_a_layernorm": rank, "input_layernorm": hidden, "post_attention_layernorm": hidden}
    if latent := config["q_lora_rank"]:
        linears |= {"q_a_proj": (latent, hidden), "q_b_proj": (heads * (nope + rope), latent)}
        norms["self_attn.q_a_layernorm"] = latent
    else:
        linears["q_proj"] = (heads * (nope + rope), hidden)
    shapes: Shapes = {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    if config.get("attention_bias"):
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        shapes |= {f"self_attn.{name}.bias": linears[name][:1] for name in biased if name in linears}
    return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


def feed_forward_shapes(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a layer's experts, or of its dense feed-forward."""
    family, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    experts = next(config[key] for key in EXPERTS if key in config)
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    shared = config.get("n_shared_experts", 1) * ffn
    sigmoid = ("glm4_moe", "solar_open", "dots1", "exaone_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1")
    sigmoid += ("mistral4",)
    if family == "axk1":
        yield "post_mlp_layernorm.weight", (hidden,)
    if family in (
        "qwen3_moe",
        "qwen3_next",
        "qwen2_moe",
        "mellum",
        "olmoe",
        "ernie4_5_moe",
        "qwen3_vl_moe_text",
        *sigmoid,
    ):
        step = config.get("decoder_sparse_step", 1)
        dense = range(config.get("first_k_dense_replace", family in ("ernie4_5_moe", "exaone_moe")))
        if "mlp_layer_types" in config:
            dense = [number for number, kind in enumerate(config["mlp_layer_types"]) if kind == "dense"]
        if layer in dense or layer in config.get("mlp_only_layers", []) or (layer + 1) % step:
            yield from gated_shapes("mlp.", hidden, config["intermediate_size"])
            return
        yield "mlp.gate.weight", (experts, hidden)
        yield from expert_shapes(config, experts, ffn)
        if family in ("qwen2_moe", "qwen3_next"):
            yield "mlp.shared_expert_gate.weight", (1, hidden)
            yield from gated_shapes("mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        if family in sigmoid:
            if family not in ("axk1", "deepseek_v2", "mistral4"):
                yield f"mlp.{'' if family == 'exaone_moe' else 'gate.'}e_score_correction_bias", (experts,)
            yield from gated_shapes("mlp.shared_experts.", hidden, shared)
        if family == "ernie4_5_moe":
            yield "mlp.moe_statics.e_score_correction_bias", (1, experts)
            yield from gated_shapes("mlp.shared_experts.", hidden, config["moe_num_shared_experts"] * ffn)
    elif family == "hunyuan_v1_moe":
        yield "mlp.gate.wg.weight", (experts, hidden)
        for expert in range(experts):
            yield from gated_shapes(f"mlp.experts.{expert}.", hidden, ffn)
        yield from gated_shapes("mlp.shared_mlp.", hidden, ffn)
    elif family == "cohere2_moe":
        if layer < config["first_k_dense_replace"]:
            yield from gated_shapes("mlp.", hidden, config["prefix_dense_intermediate_size"])
            return
        yield "mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield from gated_shapes(f"mlp.experts.{expert}.", hidden, ffn)
        yield from gated_shapes("mlp.shared_experts.", hidden, config["num_shared_experts"] * ffn)
    elif family == "granitemoe_swa":
        yield "block_sparse_moe.router.weight", (experts, hidden)
        yield "block_sparse_moe.experts.gate_up_proj", (experts, 2 * ffn, hidden)
        yield "block_sparse_moe.experts.down_proj", (experts, hidden, ffn)
        yield "shared_mlp.input_linear.weight", (2 * config["shared_intermediate_size"], hidden)
        yield "shared_mlp.output_linear.weight", (hidden, config["shared_intermediate_size"])
    elif family == "mimo_v2_flash":
        if layer == 0:
            yield from gated_shapes("mlp.", hidden, config["intermediate_size"])
            return
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from gated_shapes(f"mlp.experts.{expert}.", hidden, ffn)
    elif family in ("afmoe", "hy_v3"):
        if layer == 0:
            yield from gated_shapes("mlp.", hidden, config["intermediate_size"])
            return
        yield "mlp.router.gate.weight", (experts, hidden)
        yield "mlp.expert_bias", (experts,)
        for expert in range(experts):
            yield from gated_shapes(f"mlp.experts.{expert}.", hidden, ffn)
        shared = "mlp.shared_mlp." if family == "hy_v3" else "mlp.shared_experts."
        yield from gated_shapes(shared, hidden, config["num_shared_experts"] * ffn)
    elif family == "gpt_oss":
        yield "mlp.router.weight", (experts, hidden)
        yield "mlp.router.bias", (experts,)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * ffn)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * ffn)
        yield "mlp.experts.down_proj", (experts, ffn, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)
    elif family in ("granitemoe", "granitemoeshared"):
        yield "block_sparse_moe.router.layer.weight", (experts, hidden)
        yield "block_sparse_moe.input_linear.weight", (experts, 2 * ffn, hidden)
        yield "block_sparse_moe.output_linear.weight", (experts, hidden, ffn)
        if size := config.get("shared_intermediate_size"):
            yield "shared_mlp.input_linear.weight", (2 * size, hidden)
            yield "shared_mlp.output_linear.weight", (hidden, size)
    elif family == "llama4_text":
        step = config.get("interleave_moe_layer_step", 1)
        sparse = config["moe_layers"] if "moe_layers" in config else range(step - 1, layers, step)
        if layer not in sparse:
            yield from gated_shapes("feed_forward.", hidden, config["intermediate_size_mlp"])
            return
        yield "feed_forward.router.weight", (experts, hidden)
        yield "feed_forward.experts.gate_up_proj", (experts, hidden, 2 * ffn)
        yield "feed_forward.experts.down_proj", (experts, ffn, hidden)
        yield from gated_shapes("feed_forward.shared_expert.", hidden, ffn)
    elif family in ("minimax_m2", "phimoe"):
        yield "block_sparse_moe.gate.weight", (experts, hidden)
        if family != "phimoe":
            yield "block_sparse_moe.e_score_correction_bias", (experts,)
        for expert in range(experts):
            for name, shape in (("w1", (ffn, hidden)), ("w2", (hidden, ffn)), ("w3", (ffn, hidden))):
                yield f"block_sparse_moe.experts.{expert}.{name}.weight", shape
    else:
        yield from gated_shapes("mlp.", hidden, config["intermediate_size"])
        yield "router.proj.weight", (experts, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (experts,)
        yield "experts.gate_up_proj", (experts, 2 * ffn, hidden)
        yield "experts.down_proj", (experts, hidden, ffn)


def expert_shapes(config: Config, experts: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of experts in Qwen's and DeepSeek's layers, one by one or stacked."""
    hidden = config["hidden_size"]
    if config["model_type"] == "mistral4":
        yield "mlp.experts.gate_up_proj", (experts, 2 * ffn, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, ffn)
    elif config["model_type"] == "qwen3_vl_moe_text":
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * ffn)
        yield "mlp.experts.down_proj", (experts, ffn, hidden)
    else:
        for expert in range(experts):
            yield from gated_shapes(f"mlp.experts.{expert}.", hidden, ffn)


def gated_shapes(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a gated feed-forward."""
    yield f"{prefix}gate_proj.weight", (ffn, hidden)
    yield f"{prefix}up_proj.weight", (ffn, hidden)
    yield f"{prefix}down_proj.weight", (hidden, ffn)
