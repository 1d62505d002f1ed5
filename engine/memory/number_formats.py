"""The formats of numbers in which a model may be served, by settings alone: of weights and of pages."""

from typing import Any

import numpy as np

from caching.page_dtype import NAMES
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import Role
from engine.models.weights.published.compressed_tensors import int8_inputs
from engine.models.weights.published.quantised_tensor import UNQUANTISED
from engine.models.weights.store import kept_in_8_bits
from engine.models.weights.weight_format import WeightFormat


def quantizations(config: EngineConfig, model: ModelSpec) -> tuple[str | None, ...]:
    """The forms of the weights that may be served, the first that fits.

    It is the operator's choice, or int8 for a checkpoint that is quantised already, w8a8 if it was
    made for inputs in 8 bits, and int4 if it has 4 bits and this does not fit.
    """
    if config.quantization is not None:
        return (None if config.quantization == "none" else config.quantization,)
    if model.published is None or model.published.bits == UNQUANTISED:
        return (None,)
    first = "int8" if int8_inputs(model.published) is None else "w8a8"
    return (first, "int4") if model.published.bits == 4 else (first,)


def in_words(quantization: str, partition: Partition, form: WeightFormat) -> str:
    """A form of the weights, and what is served in another."""
    if quantization == "int8":
        return quantization
    kernels = "kernels without groups" if quantization == "int4" else "kernels whose inputs the checkpoint leaves"
    names = {Role.TABLE: "tables", Role.KERNEL: kernels, Role.EXPERTS: "experts"}
    kept = kept_in_8_bits(partition, form)
    *others, last = (name for role, name in names.items() if role in kept)
    return f"{quantization}, {', '.join(others)}{' and ' if others else ''}{last} in int8"


def page_dtype(config: EngineConfig, model: ModelSpec, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of keys and values in pages, for activations of ``dtype``.

    Raises ConfigurationError for one that the model cannot be served with.
    """
    chosen = dtype if config.kv_cache_dtype == "auto" else NAMES[config.kv_cache_dtype]
    if model.has_latents and chosen.itemsize < 2:
        raise ConfigurationError(
            f"kv_cache_dtype {config.kv_cache_dtype} is not supported for latents, which have a key beside numbers of "
            "another size: choose auto, bfloat16 or float32"
        )
    return chosen
