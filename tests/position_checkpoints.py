"""Tiny models with a table of positions: their config.json, and the tensors that published checkpoints have."""

from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 144,
    "n_positions": 64,
    "n_ctx": 64,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_BIGCODE = {
    **{key: value for key, value in GPT2.items() if key != "n_ctx"},
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "activation_function": "gelu_pytorch_tanh",
    "n_inner": 80,
    "multi_query": True,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 144,
    "hidden_size": 64,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
POSITION_VARIANTS: dict[str, tuple[int, Config]] = {
    "gpt2": (47, GPT2),
    "gpt_bigcode": (0, {**GPT_BIGCODE, "tie_word_embeddings": False}),
    "opt": (8, OPT),
}
"""The seed and config.json of each."""
CONV1D = ("c_attn", "c_proj", "c_fc")
"""Modules of GPT-2 whose weights are [inputs, outputs]."""


def has_position_table(config: Config) -> bool:
    """Whether ``position_shapes`` knows the model's tensors."""
    return config["model_type"] in ("gpt2", "gpt_bigcode", "opt")


def position_shapes(config: Config) -> Shapes:
    """The tensors of a model with a table of positions, under their published names: GPT-2's are the base model's."""
    if config["model_type"] == "opt":
        return _opt(config)
    hidden, own = config["n_embd"], config["model_type"] == "gpt2"
    body, heads = "" if own else "transformer.", config["n_head"]
    inner = config.get("n_inner") or 4 * hidden
    kv = hidden // heads if config.get("multi_query") else hidden
    linears = {
        "attn.c_attn": (hidden + 2 * kv, hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (inner, hidden),
        "mlp.c_proj": (hidden, inner),
    }
    shapes: Shapes = {
        f"{body}wte.weight": (config["vocab_size"], hidden),
        f"{body}wpe.weight": (config["n_positions"], hidden),
    }
    for layer in range(config["n_layer"]):
        prefix = f"{body}h.{layer}."
        for name, (outputs, inputs) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (inputs, outputs) if own else (outputs, inputs)
            shapes[f"{prefix}{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}{norm}.{kind}": (hidden,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        if own:  # the masks that its checkpoints have, and nothing reads
            shapes |= {f"{prefix}attn.bias": (1, 1, 64, 64), f"{prefix}attn.masked_bias": ()}
    shapes |= {f"{body}ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}
    return shapes if config.get("tie_word_embeddings", True) else shapes | _head(config, hidden)


def peft_modules(config: Config, modules: Shapes) -> Shapes:
    """The modules of a checkpoint as PEFT calls them, and their shapes as torch's linear modules have them."""
    if config["model_type"] != "gpt2":
        return modules
    return {f"transformer.{name}": shape[::-1] if name.endswith(CONV1D) else shape for name, shape in modules.items()}


def _opt(config: Config) -> Shapes:
    hidden, ffn = config["hidden_size"], config["ffn_dim"]
    linears = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    linears |= {"fc1": (ffn, hidden), "fc2": (hidden, ffn)}
    shapes: Shapes = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    norms = ["model.decoder.final_layer_norm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in linears.items()}
        norms += [f"{prefix}self_attn_layer_norm", f"{prefix}final_layer_norm"]
    shapes |= {f"{norm}.{kind}": (hidden,) for norm in norms for kind in ("weight", "bias")}
    return shapes if config.get("tie_word_embeddings", True) else shapes | _head(config, hidden)


def _head(config: Config, hidden: int) -> Shapes:
    return {"lm_head.weight": (config["vocab_size"], hidden)}
