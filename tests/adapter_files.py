"""Adapters with random weights in PEFT's format, the same on every machine, for checkpoints of tests/checkpoints.py."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VARIANTS, random_tensors
from moe_checkpoints import EXPERTS
from position_checkpoints import has_position_table, peft_modules
from safetensors.numpy import save_file

ATTENTION = r"self_attn\.[qkvo]_proj"
LINEAR = rf"{ATTENTION}|mlp\.(gate|up|down)_proj"
TABLES = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
MODULES = {"nemotron_h": ("backbone.", "model."), "lfm3": ("self_attn.gate_proj", "self_attn.g_proj")}
"""By model_type, what checkpoints call otherwise than transformers' modules, whose names PEFT has."""
FUSED = ("gate_up_proj", "down_proj")
"""Parameters of all experts, in the order in which PEFT wraps them: the last one is outermost."""


@dataclass(frozen=True)
class AdapterKind:
    """An adapter: what it adapts, and how."""

    targets: str
    """Expression for the end of a module's name, as PEFT's target_modules."""
    rank: int
    alpha: float = 16.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Other keys of adapter_config.json."""
    experts: str | None = None
    """What a layer calls its experts, if they are adapted as ``target_parameters``."""
    fused: tuple[str, ...] = FUSED
    """Those of their parameters that are."""


def rank_of(kind: AdapterKind, module: str) -> int:
    """The rank of a module."""
    patterns = kind.options.get("rank_pattern", {})
    return next((rank for end, rank in patterns.items() if re.match(rf"(.*\.)?({end})$", module)), kind.rank)


def adapted_modules(variant: str, kind: AdapterKind, **overrides: Any) -> dict[str, tuple[int, int]]:
    """The modules [out, in] of a variant that an adapter adapts."""
    config = VARIANTS[variant].config | overrides
    tensors = random_tensors(config, VARIANTS[variant].seed)
    weights = {
        name.removesuffix(".weight").replace(*MODULES.get(config["model_type"], ("", ""))): one.shape
        for name, one in tensors.items()
        if name.endswith(".weight")
    }
    if has_position_table(config):
        weights = peft_modules(config, weights)
    if "lm_head" not in weights and TABLES["embed_tokens"] in weights:
        weights["lm_head"] = weights[TABLES["embed_tokens"]]
    chosen = {name: shape for name, shape in weights.items() if re.fullmatch(rf".*({kind.targets})", name)}
    assert chosen or kind.experts, f"{variant} has no {kind.targets}"
    return chosen


def adapter_tensors(variant: str, kind: AdapterKind, **overrides: Any) -> dict[str, np.ndarray]:
    """The tensors of an adapter under the names that PEFT gives them."""
    rng, tensors = np.random.default_rng(kind.seed), {}
    for module, (out, inputs) in sorted(adapted_modules(variant, kind, **overrides).items()):
        rank, name = rank_of(kind, module), f"base_model.model.{module}"
        scale = (rank * inputs) ** -0.5
        if module == TABLES["embed_tokens"]:
            tensors[f"{name}.lora_embedding_A"] = rng.normal(size=(rank, out)).astype(np.float32)
            tensors[f"{name}.lora_embedding_B"] = (0.02 * rng.normal(size=(inputs, rank))).astype(np.float32)
            continue
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = (scale * rng.normal(size=(out, rank))).astype(np.float32)
    return tensors | fused_tensors(variant, kind, **overrides)


def fused_tensors(variant: str, kind: AdapterKind, **overrides: Any) -> dict[str, np.ndarray]:
    """The tensors of experts that are adapted as parameters, the first one's name deepest.

    PEFT takes those of Llama 4 for [experts, out, in], which they are not.
    """
    if kind.experts is None:
        return {}
    config = VARIANTS[variant].config | overrides
    names = random_tensors(config, VARIANTS[variant].seed).keys()
    rng, tensors, hidden = np.random.default_rng(kind.seed), {}, config["hidden_size"]
    (experts,) = (config[key] for key in EXPERTS if key in config)
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
    layers = {int(found[1]) for name in names if (found := re.search(r"layers\.(\d+)\..*experts", name))}
    for layer in sorted(layers):
        for depth, parameter in enumerate(reversed(kind.fused)):
            rank = rank_of(kind, f"model.layers.{layer}.{kind.experts}.{parameter}")
            out, inputs = shapes[parameter][:: -1 if config["model_type"] == "llama4_text" else 1]
            name = f"base_model.model.model.layers.{layer}.{kind.experts}{'.base_layer' * depth}"
            scale = (rank * inputs) ** -0.5
            tensors[f"{name}.lora_A.weight"] = rng.normal(size=(rank * experts, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (scale * rng.normal(size=(out, rank * experts))).astype(np.float32)
    return tensors


def write_adapter(
    directory: Path, variant: str, kind: AdapterKind, tensors: dict[str, np.ndarray] | None = None, **overrides: Any
) -> Path:
    """Writes an adapter's directory and returns it; ``overrides`` are keys of the model's config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "target_modules": rf".*({kind.targets})",
        "lora_dropout": 0.0 if kind.experts else 0.1,
        "bias": "none",
        **({"target_parameters": [f"{kind.experts}.{name}" for name in kind.fused]} if kind.experts else {}),
        **kind.options,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors or adapter_tensors(variant, kind, **overrides), directory / "adapter_model.safetensors")
    return directory


ADAPTERS: dict[str, dict[str, AdapterKind]] = {
    "llama2": {
        "queries and values": AdapterKind(r"self_attn\.[qv]_proj", 8, seed=1),
        "everything": AdapterKind(LINEAR, 16, 32.0, seed=2),
        "rank-stabilised": AdapterKind(rf"{ATTENTION}|mlp\.down_proj", 64, 8.0, seed=3, options={"use_rslora": True}),
        "patterns": AdapterKind(
            LINEAR,
            12,
            seed=4,
            options={
                "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 32},
                "alpha_pattern": {"o_proj": 40.0, r"layers\.[02]\.self_attn\.k_proj": 1.0},
            },
        ),
        "one layer": AdapterKind(r"layers\.1\.(self_attn\.k_proj|mlp\.gate_proj)", 1, seed=5),
        "tables": AdapterKind(r"embed_tokens|lm_head|self_attn\.v_proj", 8, seed=6),
    },
    "qwen2": {"attention": AdapterKind(ATTENTION, 8, seed=1), "everything": AdapterKind(LINEAR, 24, seed=2)},
    "gemma2": {
        "everything": AdapterKind(LINEAR, 16, seed=1),
        "up": AdapterKind(r"mlp\.up_proj", 8, 64.0, seed=2),
        "embedding": AdapterKind("embed_tokens", 8, 32.0, seed=3),
        "head": AdapterKind("lm_head", 4, 32.0, seed=4, options={"use_rslora": True}),
    },
    "phi3": {
        "everything": AdapterKind(r"qkv_proj|o_proj|gate_up_proj|down_proj", 16, seed=1),
        "qkv": AdapterKind("qkv_proj", 8, seed=2),
    },
    "qwen2_moe": {
        "attention": AdapterKind(ATTENTION, 16, seed=1),
        "shared expert": AdapterKind(rf"{ATTENTION}|shared_expert\.(gate|up|down)_proj", 8, seed=2),
        "experts": AdapterKind(
            r"self_attn\.q_proj", 8, seed=3, experts="mlp.experts", options={"rank_pattern": {"down_proj": 3}}
        ),
        "gates": AdapterKind("shared_expert_gate", 4, seed=4, experts="mlp.experts", fused=("gate_up_proj",)),
    },
    "mixtral": {
        "experts by themselves": AdapterKind(
            r"self_attn\.q_proj|experts\.\d+\.w[123]",
            8,
            seed=3,
            options={"target_modules": ["q_proj", "w1", "w2", "w3"], "lora_dropout": 0.0},
        ),
        "attention": AdapterKind(ATTENTION, 4, seed=2),
    },
    "qwen3_moe": {"experts": AdapterKind(r"self_attn\.q_proj", 8, seed=1, experts="mlp.experts")},
    "gpt_oss": {"experts": AdapterKind(ATTENTION, 8, seed=1, experts="mlp.experts")},
    "llama4": {
        "experts": AdapterKind(r"self_attn\.v_proj", 8, seed=1, experts="feed_forward.experts", fused=("down_proj",))
    },
    "deepseek_v3": {
        "latents": AdapterKind(r"q_a_proj|q_b_proj|kv_a_proj_with_mqa|self_attn\.o_proj", 16, seed=1),
        "output": AdapterKind(r"self_attn\.o_proj", 8, seed=2),
        "projection of latents": AdapterKind(r"kv_b_proj", 8, seed=3),
        "attention": AdapterKind(r"q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|self_attn\.o_proj", 24, seed=4),
    },
    "qwen3_next": {
        "everything": AdapterKind(rf"{ATTENTION}|in_proj_qkvz|in_proj_ba|out_proj", 16, seed=1),
        "attention": AdapterKind(ATTENTION, 8, seed=2),
    },
    "qwen3_5": {
        "everything": AdapterKind(rf"{LINEAR}|in_proj_(qkv|z|b|a)|out_proj", 16, seed=1),
        "delta net": AdapterKind(r"in_proj_(qkv|a)|out_proj", 8, seed=2),
    },
    "nemotron_h": {
        "everything": AdapterKind(r"in_proj|[qkvo]_proj", 16, seed=1),
        "state space": AdapterKind(r"in_proj", 8, seed=2),
    },
    "gpt2": {
        "everything": AdapterKind(
            "c_attn|c_proj|c_fc",
            16,
            seed=1,
            options={"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        ),
        "attention": AdapterKind("c_attn", 8, seed=2),
    },
    "lfm2": {
        "everything": AdapterKind(r"in_proj|[qkv]_proj|out_proj|w[123]", 16, seed=1),
        "convolution": AdapterKind(r"conv\.(in|out)_proj", 8, seed=2),
    },
    "lfm3": {
        "everything": AdapterKind(r"in_proj|[qkvog]_proj|out_proj|w[123]", 16, seed=1),
        "gates": AdapterKind(r"self_attn\.g_proj", 4, seed=2),
    },
}
"""By variant, the adapters that goldens are made of."""
MANY = {f"number {number}": AdapterKind(LINEAR, 8 + 56 * number // 63, seed=100 + number) for number in range(64)}
"""Adapters of ranks 8 to 64."""
SETS: dict[str, tuple[str, dict[str, AdapterKind]]] = {
    **{variant: (variant, adapters) for variant, adapters in ADAPTERS.items()},
    "many": ("llama2", MANY),
}
"""By the name of a golden, the variant and the adapters that it is made of."""
