"""Tiny models with layers that keep a state: their config.json, and the tensors that published checkpoints have."""

import math
from typing import Any

from moe_checkpoints import Config, Shapes, attention_shapes, feed_forward_shapes, gated_shapes

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
    "rope_theta": 1000.0,
}
QWEN3_5 = {
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and key != "mlp_only_layers"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
OLMO_HYBRID = {
    "architectures": ["OlmoHybridForCausalLM"],
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
GRANITE_HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "position_embedding_type": "nope",
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "rope_theta": 1000.0,
}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "head_dim": 16,
    "hybrid_override_pattern": "M-M*-ME",
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "time_step_min": 0.4,
    "time_step_limit": [0.0, math.inf],
    "layer_norm_epsilon": 1e-4,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "rope_theta": 1000.0,
}
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_d_head": 12,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_rms_norm": True,
    "projectors_bias": True,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.8,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 0.7, 1.3, 1.2, 0.9],
    "mlp_multipliers": [1.3, 0.7],
    "rope_theta": 1000.0,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "norm_eps": 1e-4,
    "conv_bias": True,
    "block_ff_dim": 120,
    "block_ffn_dim_multiplier": 0.8,
    "block_multiple_of": 16,
    "tie_embedding": True,
    "rope_theta": 1000.0,
}
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 4,
    "num_dense_layers": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "rope_theta": 1000.0,
}

LFM3 = {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "sliding_attention", "conv"],
    "head_dim": 16,
    "pad_token_id": 0,
    "norm_eps": 1e-4,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

STATE_VARIANTS: dict[str, tuple[int, Config]] = {
    "qwen3_next": (6, QWEN3_NEXT),
    "qwen3_5": (14, QWEN3_5),
    "qwen3_5_moe": (
        5,
        {
            **{key: value for key, value in QWEN3_NEXT.items() if key != "mlp_only_layers"},
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
        },
    ),
    "olmo_hybrid": (2, OLMO_HYBRID),
    "granite_hybrid": (1, GRANITE_HYBRID),
    "granite_hybrid_dense": (
        1,
        {
            **GRANITE_HYBRID,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_head": 16,
            "time_step_limit": [0.4, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (0, NEMOTRON_H),
    "nemotron_h_dense": (
        1,
        {
            **{
                key: value
                for key, value in NEMOTRON_H.items()
                if "expert" not in key and key != "hybrid_override_pattern"
            },
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "bamba": (2, BAMBA),
    "falcon_h1": (2, FALCON_H1),
    "lfm2": (1, LFM2),
    "lfm2_moe": (0, LFM2_MOE),
    "lfm3": (0, LFM3),
}
"""By name, a seed under which greedy paths and routes are clear-cut, and the keys beside the common sizes."""


def has_states(config: Config) -> bool:
    """Whether ``state_shapes`` knows the model's tensors."""
    return config["model_type"] in {variant["model_type"] for _, variant in STATE_VARIANTS.values()}


def norm_scale(config: Config, name: str) -> float:
    """The mean of a norm's stored scales."""
    is_centred = has_states(config) and config["model_type"].startswith("qwen") and "linear_attn" not in name
    return 0.0 if is_centred else 1.0


def state_shapes(config: Config) -> Shapes:
    """The tensors of a model with states, under their published names."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    if config["model_type"] == "nemotron_h":
        return _nemotron(config)
    if config["model_type"].startswith("lfm"):
        return _lfm(config)
    norm = "final_layernorm" if config["model_type"] in ("bamba", "falcon_h1") else "norm"
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), f"model.{norm}.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        make = {"granitemoehybrid": _granite, "bamba": _bamba, "falcon_h1": _falcon, "olmo_hybrid": _olmo}.get(
            config["model_type"], qwen_shapes
        )
        of_layer = make(config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def qwen_shapes(config: Config, layer: int) -> Shapes:
    """The tensors of a layer."""
    hidden, kind = config["hidden_size"], config["model_type"]
    shapes: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if (layer + 1) % config.get("full_attention_interval", 4) == 0:
        shapes |= attention_shapes(config, layer)
    else:
        shapes |= {f"linear_attn.{name}": shape for name, shape in _delta_net(config).items()}
    if kind == "qwen3_next":
        return shapes | dict(feed_forward_shapes(config, layer))
    if kind == "qwen3_5_text":
        return shapes | dict(gated_shapes("mlp.", hidden, config["intermediate_size"]))
    experts, ffn = config["num_experts"], config["moe_intermediate_size"]
    return {
        **shapes,
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),
        "mlp.experts.down_proj": (experts, hidden, ffn),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **dict(gated_shapes("mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])),
    }


def _delta_net(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys, values = (
        config["linear_num_key_heads"] * config["linear_key_head_dim"],
        config["linear_value_head_dim"] * heads,
    )
    shapes: Shapes = {
        "conv1d.weight": (2 * keys + values, 1, config.get("linear_conv_kernel_dim", 4)),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }
    if config["model_type"] == "qwen3_next":
        rows: dict[str, int] = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    else:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return shapes | {f"in_proj_{name}.weight": (count, hidden) for name, count in rows.items()}


def _olmo(config: Config, layer: int) -> Shapes:
    hidden, key_dim = config["hidden_size"], config["linear_key_head_dim"]
    shapes: Shapes = dict(gated_shapes("mlp.", hidden, config["intermediate_size"]))
    if layer == config["num_hidden_layers"] - 1:
        shapes |= {name: shape for name, shape in attention_shapes(config, layer).items() if "layernorm" not in name}
        return shapes | {f"post_{part}_layernorm.weight": (hidden,) for part in ("attention", "feedforward")}
    keys, heads = config["linear_num_key_heads"] * key_dim, config["linear_num_value_heads"]
    values = 2 * key_dim * heads
    rows = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
    own: Shapes = {f"{name}_proj.weight": (count, hidden) for name, count in rows.items()}
    own |= {f"{name}_conv1d.weight": (rows[name], 1, 4) for name in "qkv"}
    own |= {"A_log": (heads,), "dt_bias": (heads,), "o_norm.weight": (2 * key_dim,), "o_proj.weight": (hidden, values)}
    shapes |= {f"{name}_layer_norm.weight": (hidden,) for name in ("attention", "feedforward")}
    return shapes | {f"linear_attn.{name}": shape for name, shape in own.items()}


def _granite(config: Config, layer: int) -> Shapes:
    hidden, size = config["hidden_size"], config["shared_intermediate_size"]
    shapes: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    is_full = config["layer_types"][layer] in ("attention", "full_attention")
    shapes |= attention_shapes(config, layer) if is_full else _mamba(config)
    shapes["shared_mlp.input_linear.weight"] = (2 * size, hidden)
    shapes["shared_mlp.output_linear.weight"] = (hidden, size)
    if experts := config["num_local_experts"]:
        ffn = config["intermediate_size"]
        shapes["block_sparse_moe.router.layer.weight"] = (experts, hidden)
        shapes["block_sparse_moe.input_linear.weight"] = (experts, 2 * ffn, hidden)
        shapes["block_sparse_moe.output_linear.weight"] = (experts, hidden, ffn)
    return shapes


def _bamba(config: Config, layer: int) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    shapes = _mamba(config)
    if layer in config["attn_layer_indices"]:
        shapes = {name: shape for name, shape in attention_shapes(config, layer).items() if "layernorm" not in name}
    shapes |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "pre_ff")}
    for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        shapes |= {f"feed_forward.{name}_proj.weight": (rows, columns), f"feed_forward.{name}_proj.bias": (rows,)}
    return shapes


def _falcon(config: Config, layer: int) -> Shapes:
    hidden = config["hidden_size"]
    attention = {name: shape for name, shape in attention_shapes(config, layer).items() if "layernorm" not in name}
    shapes = {**attention, **_mamba(config), "mamba.out_proj.bias": (hidden,)}
    shapes |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "pre_ff")}
    return {**shapes, **dict(gated_shapes("feed_forward.", hidden, config["intermediate_size"]))}


def _mamba(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    sizes = (
        config.get("mamba_d_ssm", 2 * hidden),
        config["mamba_n_heads"],
        config.get("mamba_n_groups", 1),
        config["mamba_d_state"],
    )
    has = (config.get("mamba_conv_bias", True), config.get("mamba_proj_bias", False))
    return {f"mamba.{name}": shape for name, shape in mamba_shapes(hidden, sizes, has).items()}


def _nemotron(config: Config) -> Shapes:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"backbone.embeddings.weight": (vocabulary, hidden), "backbone.norm_f.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer, layer_type in enumerate(config.get("hybrid_override_pattern") or config["layers_block_type"]):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        of_part = _nemotron_part(config, layer_type)
        shapes |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in of_part.items()}
    return shapes


def _nemotron_part(config: Config, layer_type: str) -> Shapes:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    if layer_type in ("M", "linear_attention"):
        wide = config["mamba_num_heads"] * config["mamba_head_dim"]
        sizes = (wide, *(config[key] for key in ("mamba_num_heads", "n_groups", "ssm_state_size")))
        has = (config.get("use_conv_bias", True), config.get("use_bias", False))
        return mamba_shapes(hidden, sizes, has, config["conv_kernel"])
    if layer_type in ("*", "full_attention"):
        q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
        shapes: Shapes = {f"{name}_proj.weight": (size, hidden) for name, size in (("q", q), ("k", kv), ("v", kv))}
        return {**shapes, "o_proj.weight": (hidden, q)}
    if layer_type in ("-", "mlp"):
        biases: Shapes = {"up_proj.bias": (ffn,), "down_proj.bias": (hidden,)} if config.get("mlp_bias") else {}
        return {"up_proj.weight": (ffn, hidden), "down_proj.weight": (hidden, ffn), **biases}
    experts, size = config["n_routed_experts"], config["moe_intermediate_size"]
    shared = config["moe_shared_expert_intermediate_size"]
    each: Shapes = {}
    for expert in range(experts):
        each[f"experts.{expert}.up_proj.weight"] = (size, hidden)
        each[f"experts.{expert}.down_proj.weight"] = (hidden, size)
    return {
        "gate.weight": (experts, hidden),
        "gate.e_score_correction_bias": (experts,),
        **each,
        "shared_experts.up_proj.weight": (shared, hidden),
        "shared_experts.down_proj.weight": (hidden, shared),
    }


def _lfm(config: Config) -> Shapes:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.embedding_norm.weight": (hidden,)}
    if not config.get("tie_embedding", config.get("tie_word_embeddings", True)):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer, layer_type in enumerate(config["layer_types"]):
        is_third = config["model_type"] == "lfm3"
        norms = ("operator", "ffn", *(("post_operator", "post_ffn") if is_third else ()))
        of_layer = {f"{name}_norm.weight": (hidden,) for name in norms}
        attention = _gated_attention if is_third else _normed_attention
        of_layer |= _short_convolution(config) if layer_type == "conv" else attention(config, layer)
        of_layer |= _lfm2_feed_forward(config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _short_convolution(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    shapes: Shapes = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, config.get("conv_L_cache", 7 if config["model_type"] == "lfm3" else 3)),
        "conv.out_proj.weight": (hidden, hidden),
    }
    if config.get("conv_bias"):
        biases = {"in_proj": 3 * hidden, "conv": hidden, "out_proj": hidden}
        shapes |= {f"conv.{name}.bias": (size,) for name, size in biases.items()}
    return shapes


def _gated_attention(config: Config, layer: int) -> Shapes:
    gates = {"self_attn.gate_proj.weight": (config["num_attention_heads"], config["hidden_size"])}
    return gates | {name: shape for name, shape in attention_shapes(config, layer).items() if "layernorm" not in name}


def _normed_attention(config: Config, layer: int) -> Shapes:  # noqa: ARG001
    hidden = config["hidden_size"]
    size = hidden // config["num_attention_heads"]
    rows = {"q_proj": hidden, "k_proj": size * config["num_key_value_heads"], "out_proj": hidden}
    shapes: Shapes = {f"self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
    shapes["self_attn.v_proj.weight"] = shapes["self_attn.k_proj.weight"]
    return shapes | {f"self_attn.{name}_layernorm.weight": (size,) for name in "qk"}


def _lfm2_feed_forward(config: Config, layer: int) -> Shapes:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    if experts and layer >= config["num_dense_layers"]:
        each = (f"experts.{expert}." for expert in range(experts))
        shapes: Shapes = {}
        for prefix in each:
            shapes |= _w1_to_w3(prefix, hidden, config["moe_intermediate_size"])
        shapes |= {"gate.weight": (experts, hidden), "expert_bias": (experts,)}
    else:
        columns = config["intermediate_size"]
        if given := config.get("block_ff_dim"):
            step, share = config["block_multiple_of"], config["block_ffn_dim_multiplier"]
            columns = step * math.ceil(int(share * int(2 * given / 3)) / step)
        shapes = _w1_to_w3("", hidden, columns)
    return {f"feed_forward.{name}": shape for name, shape in shapes.items()}


def _w1_to_w3(prefix: str, hidden: int, ffn: int) -> Shapes:
    of_first = dict.fromkeys((f"{prefix}w1.weight", f"{prefix}w3.weight"), (ffn, hidden))
    return {**of_first, f"{prefix}w2.weight": (hidden, ffn)}


def mamba_shapes(hidden: int, sizes: tuple[Any, ...], has_bias: tuple[bool, bool], taps: int = 4) -> Shapes:
    """The tensors of a layer: of all heads together, their number, the groups and their states; biases."""
    wide, heads, groups, state = sizes
    channels, (of_convolution, of_products) = wide + 2 * groups * state, has_bias
    shapes: Shapes = {
        "in_proj.weight": (wide + channels + heads, hidden),
        "conv1d.weight": (channels, 1, taps),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (wide,),
        "out_proj.weight": (hidden, wide),
    }
    if of_convolution:
        shapes["conv1d.bias"] = (channels,)
    if of_products:
        shapes |= {"in_proj.bias": (wide + channels + heads,), "out_proj.bias": (hidden,)}
    return shapes
