"""FP8: numbers of 8 bits, with a scale for each tensor, output or block of 128 x 128.

As transformers (``weight_scale_inv``, by which numbers are multiplied all the same), FBGEMM and
vLLM's tools (``weight_scale``) write it. Activations are not quantised here: their scales are
not read.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import Count
from engine.models.weights.published.quantised_tensor import Format, QuantisedTensor, companion
from engine.models.weights.published.scaled import FLOATS8, Block, scaled_tensor
from engine.models.weights.sources.tensor_source import TensorSource


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``; the default is transformers' for ``fp8``."""

    weight_block_size: tuple[Count, Count] | None = (128, 128)


@dataclass(frozen=True)
class FP8:
    """A Format."""

    blocks: tuple[Block, ...]
    description: str = "FP8"
    bits: int = 8

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format."""
        return {
            name: scaled_tensor(
                source, name, companion(source, name, f"{name}_scale_inv", f"{name}_scale"), self.blocks
            )
            for name in source.names
            if source.info(name).stored_as in FLOATS8
        }


def fp8(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``."""
    by_output = config.get("quant_method") == "fbgemm_fp8"
    block = None if by_output else msgspec.convert(config, _Fields).weight_block_size
    return FP8(()) if block is None else FP8((block,), f"FP8 in blocks of {block[0]} x {block[1]}")
