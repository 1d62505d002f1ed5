"""Configs of families whose feed-forward layers are dense, and whose mixers attend."""

from scripts.random_configs.chance import ROPES, Chance, Config, Families, head_dim

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
LLAMA_ONLY = ("num_key_value_heads", "head_dim", "rms_norm_eps")
"""What GPT-2 and OPT have not."""


def llama(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.some(attention_bias=True, mlp_bias=True)}
    return {**config, **chance.rope(*ROPES, "longrope", pairs=head_dim(config) // 2)}


def internlm3(chance: Chance) -> Config:
    names = chance.of(("qkv_bias", "bias"), ("attention_bias", "mlp_bias"))
    return {**chance.sizes(), **chance.rope(*ROPES), **dict.fromkeys(names, chance.of(True, False))}


def mistral(chance: Chance) -> Config:
    return {**chance.sizes(), **chance.rope(*ROPES), **chance.some(sliding_window=chance.of(8, None))}


def qwen2(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(sliding_window=8, max_window_layers=1)}
    return {**config, **chance.some(use_sliding_window=True)}


def qwen3(chance: Chance) -> Config:
    return {**qwen2(chance), "head_dim": chance.of(8, 16), **chance.some(attention_bias=True)}


def gemma2(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear"), "head_dim": 16, "sliding_window": 8}
    config |= chance.some(hidden_activation=chance.of("gelu", "gelu_pytorch_tanh", "silu"), attention_bias=True)
    config |= chance.some(layer_types=chance.types(config), query_pre_attn_scalar=24)
    return {**config, **chance.some(attn_logit_softcapping=2.0, final_logit_softcapping=chance.of(8.0, None))}


def gemma3(chance: Chance) -> Config:
    config = {**chance.sizes(), "head_dim": 16, "sliding_window": 8, **chance.some(attention_bias=True)}
    config |= chance.some(sliding_window_pattern=3, final_logit_softcapping=8.0, attn_logit_softcapping=2.0)
    config |= chance.some(query_pre_attn_scalar=24, hidden_activation=chance.of("gelu", "gelu_pytorch_tanh"))
    config |= chance.some(layer_types=chance.types(config))
    linear = {"rope_type": "linear", "factor": 4.0}
    config |= chance.of(
        chance.some(rope_theta=5e4, rope_local_base_freq=500.0, rope_scaling=linear),
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e4, **chance.of({"rope_type": "default"}, linear)},
                "sliding_attention": {"rope_type": "default", **chance.some(rope_theta=500.0)},
            }
        },
    )
    return config


def phi3(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.some(sliding_window=8, original_max_position_embeddings=chance.of(16, 32))}
    share = chance.of(None, 0.5, 0.75)
    config |= {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    config |= chance.rope("longrope", pairs=int(16 * (share or 1)) // 2, partial=share)
    if share and "partial_rotary_factor" not in {**config, **config.get("rope_parameters", {})}:
        config["partial_rotary_factor"] = share
    return config


def gemma4(chance: Chance) -> Config:
    config = {**chance.sizes(), "head_dim": 8, "sliding_window": 8, **chance.some(attention_bias=True)}
    config |= {"global_head_dim": 16, "vocab_size_per_layer_input": 96}
    config |= {"hidden_size_per_layer_input": chance.of(0, 8), "num_hidden_layers": chance.of(4, 7)}
    types = [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"]
    config |= {"layer_types": [*types[: config["num_hidden_layers"] - 1], "full_attention"]}
    if config["hidden_size_per_layer_input"]:  # without, transformers fails if layers share keys
        config |= {"num_kv_shared_layers": chance.of(0, 1, config["num_hidden_layers"] - 3)}
    config |= chance.some(use_double_wide_mlp=True, final_logit_softcapping=8.0)
    config |= chance.some(attention_k_eq_v=True, num_global_key_value_heads=1)
    full = {"rope_type": "proportional", "partial_rotary_factor": chance.of(0.25, 0.5), "rope_theta": 5e3}
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    return {**config, **chance.some(rope_parameters={"full_attention": full, "sliding_attention": sliding})}


def cohere(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn"), **chance.some(attention_bias=True, logit_scale=0.5)}
    config.pop("head_dim", None)
    return {**config, **chance.some(layer_norm_eps=1e-3, use_qk_norm=True)}


def cohere2(chance: Chance) -> Config:
    config = {**cohere(chance), "sliding_window": 8, **chance.some(sliding_window_pattern=2)}
    return {**config, **chance.some(layer_types=chance.types(config))}


def olmo(chance: Chance) -> Config:
    return {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True, clip_qkv=1.5)}


def olmo2(chance: Chance) -> Config:
    return {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True)}


def olmo3(chance: Chance) -> Config:
    config = {**chance.sizes(), "sliding_window": 8, **chance.some(attention_bias=True, rope_theta=1000.0)}
    config |= chance.some(layer_types=chance.types(config))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **chance.yarn()}
    yarn.pop("truncate", None)
    return {**config, **chance.some(rope_scaling=yarn)}


def smollm3(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True, mlp_bias=True)}
    config |= chance.some(use_sliding_window=True, no_rope_layer_interval=2)
    config |= {"sliding_window": 8} if "use_sliding_window" in config else {}
    return {**config, **chance.some(no_rope_layers=[chance.of(0, 1) for _ in range(config["num_hidden_layers"])])}


def granite(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True, mlp_bias=True)}
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 4.0}
    return {**config, **chance.some(attention_multiplier=0.1, **multipliers)}


def glm(chance: Chance) -> Config:
    config = {**chance.sizes(), "head_dim": chance.of(8, 16), **chance.some(attention_bias=chance.of(True, False))}
    return {**config, **chance.rope("linear", "yarn", partial=chance.of(0.5, 0.25, 1.0))}


def gemma(chance: Chance) -> Config:
    return {**chance.sizes(), **chance.rope("linear", "yarn"), **chance.some(attention_bias=True), "head_dim": 16}


def ernie(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn"), "head_dim": chance.of(8, 16)}
    return {**config, **chance.some(use_bias=True)}


def exaone4(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), "sliding_window": 8, **chance.some(sliding_window_pattern=2)}
    return {**config, **chance.some(layer_types=chance.types(config))}


def arcee(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True, mlp_bias=True)}
    return {**config, **chance.some(hidden_act="relu2")}


def nemotron(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "llama3", "yarn", partial=chance.of(0.5, 1.0))}
    return {**config, **chance.some(norm_eps=1e-3, attention_bias=True, mlp_bias=True, hidden_act="relu2")}


def jais2(chance: Chance) -> Config:
    return {**arcee(chance), **chance.some(layer_norm_eps=1e-3, attention_bias=False, mlp_bias=False)}


def phi(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn", partial=chance.of(0.5, 0.25, 1.0)), "head_dim": 16}
    return {**config, **chance.some(layer_norm_eps=1e-3)}


def gpt_neox(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.some(rotary_pct=chance.of(0.5, 1.0), rotary_emb_base=1000)}
    ropes = chance.rope("linear", "yarn") if chance.of(True, False) else {}
    return {**config, **ropes, **chance.some(layer_norm_eps=1e-3, use_parallel_residual=False, attention_bias=False)}


def granite_swa(chance: Chance) -> Config:
    config = {**granite(chance), "sliding_window": 8}
    thetas = [chance.of(0, 500.0, 10000) for _ in range(config["num_hidden_layers"])]
    return {**config, **chance.some(layer_types=chance.types(config), layer_rope_theta=thetas)}


def hyperclovax(chance: Chance) -> Config:
    return {**granite(chance), **chance.some(use_post_norm=chance.of(True, False), attention_multiplier=None)}


def cwm(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(mlp_bias=True), "head_dim": 16}
    return {**config, "sliding_window": 8, **chance.some(layer_types=chance.types(config))}


def helium(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True, mlp_bias=True)}
    return {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}


def apertus(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True)}
    return {**config, **chance.some(hidden_act="xielu")}


def hunyuan(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(attention_bias=True), "head_dim": chance.of(8, 16)}
    alpha = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    return {**config, **chance.some(rope_scaling={**alpha, "mscale": 1.0, "mscale_all_dim": 1.0})}


def starcoder2(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **chance.some(use_bias=chance.of(True, False))}
    return {**config, **chance.some(norm_epsilon=1e-3, sliding_window=8)}


def gpt2(chance: Chance) -> Config:
    config = {GPT2_NAMES.get(key, key): value for key, value in chance.sizes().items() if key not in LLAMA_ONLY}
    inner = config.pop("n_inner")
    config |= chance.some(n_inner=chance.of(inner, None), layer_norm_epsilon=1e-3, scale_attn_weights=False)
    return {**config, **chance.some(scale_attn_by_inverse_layer_idx=True)}


def gpt_bigcode(chance: Chance) -> Config:
    return {**gpt2(chance), **chance.some(multi_query=False)}


def opt(chance: Chance) -> Config:
    names = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
    config = {names.get(key, key): value for key, value in chance.sizes().items() if key not in LLAMA_ONLY}
    config |= chance.some(word_embed_proj_dim=chance.of(config["hidden_size"], None), do_layer_norm_before=True)
    return {**config, **chance.some(enable_bias=False, layer_norm_elementwise_affine=False)}


def stablelm(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope("linear", "yarn", partial=chance.of(0.5, 1.0))}
    config.pop("head_dim", None)
    return {
        **config,
        **chance.some(layer_norm_eps=1e-3, use_qkv_bias=True, use_parallel_residual=True, qk_layernorm=True),
    }


def ministral(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), "sliding_window": 8}
    return {**config, **chance.some(layer_types=chance.types(config))}


def ministral3(chance: Chance) -> Config:
    config = {**chance.sizes(), "head_dim": 16, **chance.some(sliding_window=8)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, **chance.yarn()}
    return {**config, "rope_parameters": {**yarn, "rope_theta": 1000.0, "llama_4_scaling_beta": chance.of(0.1, 0.4)}}


def seed_oss(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), "head_dim": 16, **chance.some(attention_bias=False)}
    return {**config, **chance.some(attention_out_bias=True, mlp_bias=True)}


FAMILIES: Families = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "gemma4_text": gemma4,
    "cohere": cohere,
    "cohere2": cohere2,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "smollm3": smollm3,
    "granite": granite,
    "glm": glm,
    "glm4": glm,
    "gemma": gemma,
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "ministral": ministral,
    "ministral3": ministral3,
    "seed_oss": seed_oss,
    "arcee": arcee,
    "nemotron": nemotron,
    "phi": phi,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "opt": opt,
    "jais2": jais2,
    "internlm3": internlm3,
    "iquestcoder": llama,
    "granite_swa": granite_swa,
    "hyperclovax": hyperclovax,
    "cwm": cwm,
    "vaultgemma": gemma2,
    "helium": helium,
    "apertus": apertus,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "hunyuan_v1_dense": hunyuan,
}
