"""Configs of families with experts."""

from scripts.random_configs.chance import MAX_POSITION, ROPES, VISION, Chance, Config, Families, head_dim
from scripts.random_configs.dense import cohere2, exaone4, gemma4, granite, hunyuan


def experts(chance: Chance, count: str, chosen: str, of: tuple[int, ...] = (1, 3, 4, 6)) -> Config:
    """How many experts, and how many of them a token has, under these names."""
    number = chance.of(*of)
    return {count: number, chosen: chance.of(*range(1, number + 1))}


def qwen3_moe(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **experts(chance, "num_experts", "num_experts_per_tok")}
    config |= {"moe_intermediate_size": chance.of(8, 24), **chance.some(norm_topk_prob=chance.of(True, False))}
    config |= chance.some(decoder_sparse_step=chance.of(1, 2), mlp_only_layers=chance.of([], [0], [1, 5]))
    config |= chance.some(sliding_window=8, max_window_layers=1, attention_bias=True)
    return {**config, **chance.some(use_sliding_window="sliding_window" in config)}


def mellum(chance: Chance) -> Config:
    config = {**chance.sizes(), **experts(chance, "num_experts", "num_experts_per_tok"), "head_dim": chance.of(8, 16)}
    config |= {"moe_intermediate_size": chance.of(8, 24), "sliding_window": 8, **chance.some(attention_bias=True)}
    config |= chance.some(layer_types=chance.types(config), norm_topk_prob=False)
    config |= chance.some(mlp_layer_types=[chance.of("dense", "sparse") for _ in range(config["num_hidden_layers"])])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **chance.yarn()}
    full = {"rope_theta": 5e4, **chance.of({"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, yarn)}
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    return {**config, **chance.some(rope_parameters={"full_attention": full, "sliding_attention": sliding})}


def qwen2_moe(chance: Chance) -> Config:
    config = {**qwen3_moe(chance), "shared_expert_intermediate_size": chance.of(8, 40)}
    config.pop("attention_bias", None)
    return {**config, **chance.some(qkv_bias=chance.of(True, False))}


def hy_v3(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **experts(chance, "num_experts", "num_experts_per_tok")}
    config |= {"num_shared_experts": chance.of(1, 2), "moe_intermediate_size": chance.of(8, 24)}
    config |= {"head_dim": chance.of(8, 16), **chance.some(attention_bias=True, router_scaling_factor=1.5)}
    return {**config, **chance.some(mlp_layer_types=mlp_types(chance, config))}


def hunyuan_moe(chance: Chance) -> Config:
    config = {**hunyuan(chance), **experts(chance, "num_experts", "moe_topk")}
    config |= {"moe_topk": chance.of(config["moe_topk"], [config["moe_topk"]] * config["num_hidden_layers"])}
    return config


def mlp_types(chance: Chance, config: Config) -> list[str]:
    """A kind of feed-forward for each layer."""
    return [chance.of("dense", "sparse") for _ in range(config["num_hidden_layers"])]


def cohere2_moe(chance: Chance) -> Config:
    config = {**cohere2(chance), **experts(chance, "num_experts", "num_experts_per_tok"), "head_dim": chance.of(8, 16)}
    config.pop("rope_scaling", None)  # which transformers' code of this family passes over
    config |= {"prefix_dense_intermediate_size": chance.of(24, 40), "num_shared_experts": chance.of(0, 1, 2)}
    config |= chance.some(
        rms_norm_eps=1e-4, expert_selection_fn="sigmoid", norm_topk_prob=False, prefix_dense_sliding_window_pattern=2
    )
    config |= chance.some(mlp_layer_types=mlp_types(chance, config), first_k_dense_replace=chance.of(0, 1, 2))
    return {**config, **chance.some(shared_expert_combination_strategy="sum")}


def granite_moe_swa(chance: Chance) -> Config:
    config = {**granite_moe_shared(chance), "sliding_window": 8}
    config |= chance.some(layer_types=chance.types(config))
    thetas = [chance.of(0, 500.0, 1e4) for _ in range(config["num_hidden_layers"])]
    return {**config, **chance.some(layer_rope_theta=thetas)}


def gpt_oss(chance: Chance) -> Config:
    config = {**chance.sizes(), **experts(chance, "num_local_experts", "num_experts_per_tok"), "head_dim": 16}
    config |= chance.some(sliding_window=8, swiglu_limit=chance.of(0.5, 2.0), attention_bias=False)
    config |= chance.some(layer_types=chance.types(config), swiglu_alpha=1.2)
    config |= {} if "sliding_window" in config else {"sliding_window": 12}
    return {**config, **chance.rope("linear", "yarn")}


def sigmoid_router(chance: Chance) -> Config:
    """The keys of a router like DeepSeek-V3's."""
    groups, each = chance.of((1, 4), (1, 6), (2, 2), (3, 2), (2, 4))
    used = chance.of(*range(1, groups + 1))
    config = {"n_routed_experts": groups * each, "n_group": groups, "topk_group": used}
    config |= {"num_experts_per_tok": chance.of(*range(1, used * each + 1)), "n_shared_experts": chance.of(1, 2)}
    config |= {"moe_intermediate_size": chance.of(8, 24)}
    return {**config, **chance.some(norm_topk_prob=chance.of(True, False), routed_scaling_factor=2.5)}


def mimo_v2(chance: Chance) -> Config:
    config = {**chance.sizes(), **sigmoid_router(chance), "head_dim": chance.of(12, 24), "v_head_dim": chance.of(4, 8)}
    config |= {"num_attention_heads": 8, **chance.some(attention_bias=True, attention_value_scale=chance.of(None, 0.5))}
    config |= chance.of({"sliding_window": 8}, {"sliding_window_size": 9})
    config |= chance.some(layer_types=chance.types(config), mlp_layer_types=mlp_types(chance, config))
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    return {
        **config,
        **chance.some(rope_parameters={"full_attention": {**rope, "rope_theta": 5e4}, "sliding_attention": rope}),
    }


def glm4_moe(chance: Chance) -> Config:
    config = {**chance.sizes(), **sigmoid_router(chance), "head_dim": chance.of(8, 16)}
    config |= chance.some(attention_bias=True, use_qk_norm=True, first_k_dense_replace=chance.of(0, 2, 9))
    return {**config, **chance.rope("linear", "yarn", partial=chance.of(0.5, 0.25, 1.0))}


def solar_open(chance: Chance) -> Config:
    config = {**chance.sizes(), **sigmoid_router(chance), **chance.rope(*ROPES, partial=1.0)}
    return {**config, "head_dim": chance.of(8, 16), **chance.some(attention_bias=True)}


def dots1(chance: Chance) -> Config:
    config = {**chance.sizes(), **sigmoid_router(chance), **chance.rope(*ROPES)}
    config |= chance.some(attention_bias=True, first_k_dense_replace=chance.of(0, 2, 9), sliding_window=8)
    return {**config, **chance.some(layer_types=chance.types(config), max_window_layers=1)}


def exaone_moe(chance: Chance) -> Config:
    config = {**exaone4(chance), **sigmoid_router(chance)}
    config["num_experts"], config["num_shared_experts"] = config.pop("n_routed_experts"), config.pop("n_shared_experts")
    types = [chance.of("dense", "sparse") for _ in range(config["num_hidden_layers"])]
    return {**config, **chance.some(mlp_layer_types=types, first_k_dense_replace=chance.of(0, 2, 9))}


def afmoe(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **experts(chance, "num_experts", "num_experts_per_tok")}
    config |= {"num_shared_experts": chance.of(1, 2), "moe_intermediate_size": chance.of(8, 24), "sliding_window": 8}
    config |= {"head_dim": chance.of(8, 16), **chance.some(attention_bias=True, mup_enabled=True, route_scale=2.5)}
    config |= chance.some(num_dense_layers=chance.of(0, 2, 9), global_attn_every_n_layers=chance.of(1, 2))
    return {**config, **chance.some(layer_types=chance.types(config))}


def latent(chance: Chance) -> Config:
    """The keys of latent attention; transformers expects as many kv heads as others."""
    sizes = chance.sizes()
    config = {**sizes, **sigmoid_router(chance), "num_key_value_heads": sizes["num_attention_heads"]}
    config |= {"kv_lora_rank": chance.of(8, 24, 64), "q_lora_rank": chance.of(None, 8, 24)}
    config |= {
        "qk_nope_head_dim": chance.of(4, 8, 16),
        "qk_rope_head_dim": chance.of(4, 8),
        "v_head_dim": chance.of(4, 12),
    }
    config |= chance.some(attention_bias=True)
    config.pop("head_dim", None)
    return {**config, **chance.rope("linear", "yarn")}


def deepseek_v2(chance: Chance) -> Config:
    config = {**latent(chance), **chance.some(first_k_dense_replace=chance.of(0, 2, 9))}
    config.pop("norm_topk_prob", None)
    return {**config, **chance.of({}, {"topk_method": "group_limited_greedy"})}


def deepseek_v3(chance: Chance) -> Config:
    config = {**latent(chance), **chance.some(first_k_dense_replace=chance.of(0, 2, 9))}
    return {**config, **chance.some(rope_interleave=chance.of(True, False))}


def glm4_moe_lite(chance: Chance) -> Config:
    config = latent(chance)
    types = [chance.of("dense", "sparse") for _ in range(config["num_hidden_layers"])]
    return {**config, **chance.some(mlp_layer_types=types, rope_interleave=chance.of(True, False))}


def mistral4(chance: Chance) -> Config:
    config = {**deepseek_v3(chance), **chance.some(routed_scaling_factor=2.5)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, **chance.yarn()}
    yarn |= {"llama_4_scaling_beta": chance.of(0.1, 0.4), **chance.some(rope_theta=1000.0)}
    text = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    vision = {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16}
    text |= {"model_type": "mistral4", "rope_parameters": yarn}
    return {"model_type": "mistral3", "text_config": text, "vision_config": vision}


def axk1(chance: Chance) -> Config:
    config = {**latent(chance), "q_lora_rank": chance.of(8, 24), **chance.some(rope_interleave=chance.of(True, False))}
    config |= chance.some(mlp_layer_types=mlp_types(chance, config), first_k_dense_replace=chance.of(0, 2, 9))
    return {**config, **chance.some(moe_layer_freq=2)}


def youtu(chance: Chance) -> Config:
    config = {**latent(chance), **chance.some(rope_interleave=chance.of(True, False))}
    unused = sigmoid_router(chance)
    return {key: value for key, value in config.items() if key not in unused}


def granite_moe(chance: Chance) -> Config:
    config = {**granite(chance), **experts(chance, "num_local_experts", "num_experts_per_tok")}
    config.pop("mlp_bias", None)
    return config


def granite_moe_shared(chance: Chance) -> Config:
    return {**granite_moe(chance), **chance.some(shared_intermediate_size=chance.of(0, 8, 40))}


def llama4(chance: Chance) -> Config:
    config = {**chance.sizes(), **chance.rope(*ROPES), **experts(chance, "num_local_experts", "num_experts_per_tok")}
    config |= {"head_dim": chance.of(8, 16), "intermediate_size_mlp": 40, "attention_chunk_size": chance.of(8, 12, 64)}
    config |= chance.some(use_qk_norm=False, attn_temperature_tuning=False, attn_scale=0.4, attention_bias=True)
    config |= chance.some(floor_scale=chance.of(3, 8), interleave_moe_layer_step=2, no_rope_layer_interval=2)
    config |= chance.some(moe_layers=chance.of([], [0], [1, 2]))
    layers = range(config["num_hidden_layers"])
    types = [chance.of("full_attention", "chunked_attention") for _ in layers]
    return {**config, **chance.some(layer_types=types, no_rope_layers=[chance.of(0, 1) for _ in layers])}


def minimax_m2(chance: Chance) -> Config:
    config = {**chance.sizes(), **experts(chance, "num_local_experts", "num_experts_per_tok"), "head_dim": 16}
    config |= chance.of({}, {"rotary_dim": 8}, {"partial_rotary_factor": 0.25})
    return {**config, **chance.some(rope_theta=1000.0)}


def phimoe(chance: Chance) -> Config:
    config = {**chance.sizes(), "num_local_experts": chance.of(2, 4, 6), **chance.some(attention_bias=True)}
    config |= chance.some(router_jitter_noise=chance.of(0.1, 0.5), lm_head_bias=True, sliding_window=8)
    factors = {"short_factor": [1.5] * (head_dim(config) // 2), "long_factor": [3.0] * (head_dim(config) // 2)}
    scales = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": MAX_POSITION}
    return {**config, **chance.some(rope_scaling={"type": "longrope", **factors, **scales}, rope_theta=1000.0)}


def gemma4_moe(chance: Chance) -> Config:
    config = {**gemma4(chance), **experts(chance, "num_experts", "top_k_experts")}
    config |= {"enable_moe_block": True, "moe_intermediate_size": chance.of(8, 24)}
    return {**config, "model_type": "gemma4_text"}


def olmoe(chance: Chance) -> Config:
    config = {**chance.sizes(), **experts(chance, "num_experts", "num_experts_per_tok"), **chance.rope(*ROPES)}
    config.pop("head_dim", None)
    return {**config, **chance.some(attention_bias=True, norm_topk_prob=True)}


def ernie_moe(chance: Chance) -> Config:
    config = {**chance.sizes(), **experts(chance, "moe_num_experts", "moe_k"), **chance.rope("linear", "yarn")}
    config |= {"moe_num_shared_experts": chance.of(0, 1, 2), "moe_intermediate_size": chance.of(8, 24)}
    config |= chance.some(moe_layer_start_index=chance.of(0, 2), moe_layer_end_index=chance.of(-1, 1))
    return {**config, **chance.some(moe_layer_interval=2)}


FAMILIES: Families = {
    "youtu": youtu,
    "qwen3_moe": qwen3_moe,
    "mellum": mellum,
    "hy_v3": hy_v3,
    "mimo_v2_flash": mimo_v2,
    "hunyuan_v1_moe": hunyuan_moe,
    "cohere2_moe": cohere2_moe,
    "granitemoe_swa": granite_moe_swa,
    "qwen2_moe": qwen2_moe,
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "solar_open": solar_open,
    "dots1": dots1,
    "exaone_moe": exaone_moe,
    "afmoe": afmoe,
    "axk1": axk1,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "mistral4": mistral4,
    "granitemoe": granite_moe,
    "granitemoeshared": granite_moe_shared,
    "llama4_text": llama4,
    "phimoe": phimoe,
    "minimax_m2": minimax_m2,
    "gemma4_moe": gemma4_moe,
    "olmoe": olmoe,
    "flex_olmo": olmoe,
    "ernie4_5_moe": ernie_moe,
}
