"""Configs of families with recurrent states or convolutions."""

from scripts.random_configs.chance import Chance, Config, Families
from scripts.random_configs.experts import experts, granite_moe, sigmoid_router


def delta_net(chance: Chance) -> Config:
    """The keys of layers with a delta net."""
    keys = chance.of(1, 2, 4)
    config = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * chance.of(1, 2, 3)}
    config |= {"linear_key_head_dim": chance.of(8, 12), "linear_value_head_dim": chance.of(8, 16)}
    config |= {"full_attention_interval": chance.of(2, 3)}
    return {**config, **chance.some(linear_conv_kernel_dim=chance.of(2, 3))}


def qwen3_5(chance: Chance) -> Config:
    config = {**chance.sizes(), **delta_net(chance), "head_dim": chance.of(8, 16), **chance.some(attention_bias=True)}
    types = [chance.of("linear_attention", "full_attention") for _ in range(config["num_hidden_layers"] - 1)]
    config |= chance.some(layer_types=[*types, "full_attention"])
    return {**config, **chance.rope("linear", "yarn", partial=chance.of(0.5, 1.0))}


def qwen3_next(chance: Chance) -> Config:
    config = {**qwen3_5(chance), **experts(chance, "num_experts", "num_experts_per_tok")}
    config |= {"moe_intermediate_size": chance.of(8, 24), "shared_expert_intermediate_size": chance.of(8, 40)}
    config |= chance.some(decoder_sparse_step=chance.of(1, 2), mlp_only_layers=chance.of([], [0], [1, 5]))
    return {**config, **chance.some(norm_topk_prob=chance.of(True, False))}


def qwen3_5_moe(chance: Chance) -> Config:
    unused = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "intermediate_size")
    return {key: value for key, value in qwen3_next(chance).items() if key not in unused}


def olmo_hybrid(chance: Chance) -> Config:
    config = {**chance.sizes(), **delta_net(chance), **chance.some(attention_bias=True, linear_allow_neg_eigval=False)}
    config.pop("full_attention_interval", None)
    types = [chance.of("linear_attention", "full_attention") for _ in range(config["num_hidden_layers"] - 2)]
    config |= chance.some(layer_types=["linear_attention", *types, "full_attention"])
    for key in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"):
        config[key] = chance.of(config[key], None)
    no_rope = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return {**config, **chance.of(chance.rope("linear", "yarn"), no_rope)}


def qwen3_5_wrapped(chance: Chance) -> Config:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    text = {"model_type": "qwen3_5_text", **qwen3_5(chance)}
    return {"text_config": text, "vision_config": vision, **chance.some(tie_word_embeddings=chance.of(True, False))}


def granite_hybrid(chance: Chance) -> Config:
    config = {**granite_moe(chance), "shared_intermediate_size": chance.of(8, 40), **chance.some(num_local_experts=0)}
    layers = config["num_hidden_layers"]
    names = chance.of(("mamba", "attention"), ("linear_attention", "full_attention"))
    config |= {"layer_types": [*(chance.of(*names) for _ in range(layers - 1)), names[1]]}
    heads = chance.of(2, 4, 8)
    config |= {"mamba_n_heads": heads, "mamba_n_groups": chance.of(1, 2), "mamba_d_state": chance.of(8, 16)}
    config |= chance.some(mamba_d_head=2 * config["hidden_size"] // heads, mamba_d_conv=3, mamba_conv_bias=False)
    config |= chance.some(mamba_proj_bias=True, time_step_limit=[0.1, chance.of(0.5, 2.0)])
    return {**config, **chance.some(position_embedding_type=chance.of("rope", None))}


def bamba(chance: Chance) -> Config:
    config = {
        **chance.sizes(),
        **chance.rope("linear", "yarn", partial=0.5),
        **chance.some(attention_bias=True, mlp_bias=True),
    }
    layers, heads = config["num_hidden_layers"], chance.of(2, 4, 8)
    config |= {"attn_layer_indices": [*(layer for layer in range(layers - 1) if chance.of(True, False)), layers - 1]}
    config |= {"mamba_n_heads": heads, "mamba_n_groups": chance.of(1, 2), "mamba_d_state": chance.of(8, 16)}
    config |= chance.some(mamba_d_head=2 * config["hidden_size"] // heads, mamba_d_conv=3, mamba_conv_bias=False)
    return {**config, **chance.some(mamba_proj_bias=True, time_step_limit=[0.1, chance.of(0.5, 2.0)])}


def falcon_h1(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn"), **chance.some(attention_bias=True, mlp_bias=True)}
    heads = chance.of(2, 4, 8)
    wide = chance.of(heads * chance.of(8, 12), None)
    config |= {
        "mamba_d_ssm": wide,
        "mamba_n_heads": heads,
        "mamba_n_groups": chance.of(1, 2),
        "mamba_d_state": chance.of(8, 16),
    }
    config |= chance.some(
        mamba_d_head=(wide or 2 * config["hidden_size"]) // heads, mamba_d_conv=3, mamba_conv_bias=False
    )
    config |= chance.some(mamba_proj_bias=True, projectors_bias=True, time_step_limit=[0.1, chance.of(0.5, 2.0)])
    config |= chance.some(mamba_rms_norm=True, mamba_norm_before_gate=chance.of(True, False), mamba_use_mlp=True)
    parts = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    config |= chance.some(**{f"{part}_multiplier": float(chance.rng.uniform(0.2, 2)) for part in parts})
    some = {
        f"{part}_multipliers": chance.rng.uniform(0.2, 2, count).tolist() for part, count in (("ssm", 5), ("mlp", 2))
    }
    return {**config, **chance.some(**some)}


def nemotron_h(chance: Chance) -> Config:
    config = {**chance.sizes(), **sigmoid_router(chance), "head_dim": chance.of(8, 16)}
    config = {key: value for key, value in config.items() if key not in ("hidden_act", "tie_word_embeddings")}
    letters = [chance.of(*"MM*-E") for _ in range(config.pop("num_hidden_layers"))]
    config |= {"hybrid_override_pattern": "".join([*letters, "*"]), "mamba_num_heads": chance.of(2, 4)}
    config |= {"n_groups": chance.of(1, 2), "mamba_head_dim": chance.of(8, 12), "ssm_state_size": chance.of(8, 16)}
    config |= {"moe_shared_expert_intermediate_size": chance.of(8, 40), **chance.some(conv_kernel=3, use_bias=True)}
    config |= chance.some(
        time_step_min=0.3, use_conv_bias=False, mamba_hidden_act="gelu", mlp_hidden_act=chance.of("relu", "silu")
    )
    return {**config, **chance.some(layer_norm_epsilon=1e-3)}


def short_convolutions(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn"), **chance.some(norm_eps=1e-3, conv_bias=True)}
    types = [chance.of("conv", "conv", "full_attention") for _ in range(config["num_hidden_layers"] - 1)]
    config |= {"layer_types": [*types, "full_attention"], **chance.some(tie_embedding=chance.of(True, False))}
    return {**config, **chance.some(conv_L_cache=chance.of(2, 4))}


def lfm2(chance: Chance) -> Config:
    config = short_convolutions(chance)
    types = chance.of(config.pop("layer_types"), None)
    full = [0] if types is None else [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    config |= {"layer_types": types} if types and chance.rng.random() < 0.5 else {"full_attn_idxs": full}
    config |= chance.some(block_ff_dim=72, block_auto_adjust_ff_dim=False, block_multiple_of=chance.of(1, 16))
    return {**config, **chance.some(block_ffn_dim_multiplier=chance.of(0.7, 1.3))}


def lfm2_moe(chance: Chance) -> Config:
    config = {**short_convolutions(chance), **experts(chance, "num_experts", "num_experts_per_tok")}
    config |= {"moe_intermediate_size": chance.of(8, 24), **chance.some(num_dense_layers=chance.of(0, 1, 9))}
    config |= chance.some(use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.7)
    return config


def lfm3(chance: Chance) -> Config:
    config = {**chance.sizes(), "head_dim": chance.of(8, 16), "sliding_window": chance.of(4, 8)}
    types = [chance.of("conv", "full_attention", "sliding_attention") for _ in range(config["num_hidden_layers"] - 1)]
    last = chance.of("full_attention", "sliding_attention")
    config |= (
        {"layer_types": [*types, last]} if config["num_hidden_layers"] < 3 else chance.some(layer_types=[*types, last])
    )
    config |= chance.some(use_sandwich_norm=False, use_attention_gate=False, attention_bias=True, conv_bias=True)
    config |= chance.some(conv_L_cache=chance.of(2, 4), norm_eps=1e-3, rope_theta=500.0)
    full, sliding = (
        {"rope_type": chance.of("default", "proportional"), **chance.some(rope_theta=100.0)} for _ in range(2)
    )
    if full["rope_type"] == "proportional":
        full |= chance.some(partial_rotary_factor=chance.of(0.25, 0.5))
    scaled = {"rope_type": "yarn", "factor": 4.0, **chance.yarn()}
    ropes = {"full_attention": chance.of(full, scaled), "sliding_attention": sliding}
    return {**config, **chance.of({}, {"rope_parameters": ropes}, {"rope_scaling": ropes})}


FAMILIES: Families = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5": qwen3_5_wrapped,
    "olmo_hybrid": olmo_hybrid,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
}
