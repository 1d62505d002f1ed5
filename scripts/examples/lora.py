"""LoRA (Hu et al. 2021): two narrow matrices beside each chosen kernel, in PEFT's format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save

from scripts.examples.trainable import Tensors

RANK, ALPHA = 8, 16
"""What a kernel is changed by is ``ALPHA / RANK`` times the product of the two matrices."""
EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Pair(NamedTuple):
    """The matrices of one kernel: the kernel's change is ``b @ a``, times a scale."""

    a: Array
    """f32[RANK, in]"""
    b: Array
    """f32[out, RANK]"""


Lora = Mapping[str, Pair]
"""By the module's name in checkpoints, such as ``model.layers.0.self_attn.q_proj``."""


def new_lora(tensors: Tensors, seed: int, modules: Sequence[str] = EVERY_PROJECTION) -> Lora:
    """One that changes nothing yet: A is random, B is 0, as in PEFT."""
    rng, lora = np.random.default_rng(seed), {}
    for name in sorted(tensors):
        if name.split(".")[-2] in modules:
            out, width = tensors[name].shape
            a = rng.uniform(-(width**-0.5), width**-0.5, (RANK, width)).astype(np.float32)
            lora[name.removesuffix(".weight")] = Pair(jnp.asarray(a), jnp.zeros((out, RANK)))
    return lora


def merged(tensors: Tensors, lora: Lora) -> dict[str, Array]:
    """All tensors, the chosen kernels with their change; differentiable in both."""
    return {**tensors, **changed(tensors, lora)}


def changed(tensors: Tensors, lora: Lora) -> dict[str, Array]:
    """The chosen kernels alone, with their change."""
    scale = np.float32(ALPHA / RANK)
    return {f"{name}.weight": tensors[f"{name}.weight"] + scale * (pair.b @ pair.a) for name, pair in lora.items()}


def save_adapter(lora: Lora, directory: Path) -> None:
    """``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT's ``save_pretrained``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in lora}),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    matrices = {
        f"base_model.model.{name}.lora_{letter}.weight": np.asarray(matrix)
        for name, pair in lora.items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    (directory / "adapter_model.safetensors").write_bytes(save(matrices, metadata={"format": "pt"}))
