"""GPTQ (Frantar et al. 2022): 4 or 8 bits in groups with zeros, as AutoGPTQ and GPTQModel write it.

With act-order the inputs of a group are anywhere: ``g_idx`` has the group of each.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import require, require_one_of, without_nulls
from engine.models.weights.published.packed import BITS, WORD, PackedTensor, Zeros, group_size, matrix, packed_weights
from engine.models.weights.published.stored import Format, QuantisedTensor, companion
from engine.models.weights.sources.tensor_source import TensorSource

WORDS = ".qweight"
LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""What is added to each stored zero. For the first layout GPTQModel subtracts 1 from every number of
a word by one subtraction of the word, so a zero of 0 borrows from the next number.
"""


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``."""

    bits: int
    group_size: int = 128
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False


@dataclass(frozen=True)
class GPTQ:
    """A Format."""

    bits: int
    group: int
    """-1 is all inputs."""
    added: int

    @property
    def description(self) -> str:
        """See Format."""
        return f"GPTQ of {self.bits} bits" + (f" in groups of {self.group}" if self.group > 0 else "")

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format."""
        return packed_weights(source, WORDS, self._tensor)

    def _tensor(self, source: TensorSource, name: str) -> PackedTensor:
        words = f"{name}{WORDS}"
        scales, zeros = (companion(source, words, f"{name}.{part}") for part in ("scales", "qzeros"))
        indices = f"{name}.g_idx" if f"{name}.g_idx" in source.names else None
        packed, out = matrix(source, words)
        inputs = packed * WORD // self.bits
        return PackedTensor(
            source,
            words,
            scales,
            Zeros(zeros, packed_axis=1, added=self.added),
            self.bits,
            (out, inputs),
            self.group if self.group > 0 else inputs,
            packed_axis=0,
            transposed=True,
            indices=indices,
        )


def gptq(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(without_nulls(config, _Fields), _Fields)
    require_one_of("quantization_config's bits", fields.bits, BITS)
    require_one_of("quantization_config's checkpoint_format", fields.checkpoint_format, tuple(LAYOUTS))
    require(not fields.is_marlin_format, "GPTQ in Marlin's layout is not supported")
    return GPTQ(fields.bits, group_size(fields.group_size), LAYOUTS[fields.checkpoint_format])
