"""The readers of quantised checkpoints, by the ``quant_method`` of config.json."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from engine.models.requirements import require
from engine.models.weights.published.awq import awq
from engine.models.weights.published.compressed_tensors import compressed_tensors
from engine.models.weights.published.fp8 import fp8
from engine.models.weights.published.gptq import gptq
from engine.models.weights.published.mxfp4 import mxfp4
from engine.models.weights.published.quantised_tensor import Format

FORMATS: Mapping[str, Callable[[dict[str, Any]], Format]] = MappingProxyType(
    {"fp8": fp8, "fbgemm_fp8": fp8, "compressed-tensors": compressed_tensors, "mxfp4": mxfp4, "awq": awq, "gptq": gptq}
)
KEYS = ("quantization_config", "compression_config")
"""Of config.json; the second is the older one."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says how it has quantised, often there alone."""


def published_format(config: dict[str, Any]) -> Format | None:
    """The format that a config.json names; None if it is not quantised. Raises UnsupportedError."""
    given = next((config[key] for key in KEYS if config.get(key)), None)
    if given is None:
        return None
    require(isinstance(given, dict), f"quantization_config {str(given)[:80]!r} is not an object")
    method = given.get("quant_method")
    require(
        isinstance(method, str) and method in FORMATS,
        f"quantization_config has quant_method {str(method)[:80]!r}, which is not read; read are {', '.join(FORMATS)}: "
        "give the model that it was made from, which --quantization int8 serves in 8 bits",
    )
    return FORMATS[method](given)
