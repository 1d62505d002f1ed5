"""GPTQ (Frantar et al. 2022): 4 or 8 bits in groups with zeros, as AutoGPTQ and GPTQModel write it.

With act-order the inputs of a group are anywhere: ``g_idx`` has the group of each.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import require, require_one_of, without_nulls
from engine.models.weights.published.packed import BITS, WORD, WORDS, PackedFormat, PackedTensor, Zeros, matrix
from engine.models.weights.published.packings import Packing, group_size, packings
from engine.models.weights.published.quantised_tensor import Format, companion, companion_if_any
from engine.models.weights.sources.tensor_source import TensorSource

LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""What is added to each stored zero. For the first layout GPTQModel subtracts 1 from every number of
a word by one subtraction of the word, so a zero of 0 borrows from the next number.
"""


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``."""

    bits: int
    group_size: int = 128
    checkpoint_format: str | None = None
    format: str = "gptq"
    """The newer name of ``checkpoint_format``; most have both."""
    is_marlin_format: bool = False
    desc_act: bool = False
    dynamic: dict[str, Any] | None = None


@dataclass(frozen=True)
class GPTQ(PackedFormat):
    """A Format."""

    added: int
    by_activation: bool
    """Whether groups are made in the order of activations, and not of inputs."""

    @property
    def description(self) -> str:
        """See Format."""
        return f"GPTQ of {self.bits} bits{self.packings.usual.in_words}"

    def _tensor(self, source: TensorSource, name: str, packing: Packing) -> PackedTensor:
        words = f"{name}{WORDS}"
        scales, zeros = (companion(source, words, f"{name}.{part}") for part in ("scales", "qzeros"))
        indices = companion_if_any(source, words, f"{name}.g_idx", required=self.by_activation and packing.group > 0)
        packed, out = matrix(source, words)
        inputs = packed * WORD // packing.bits
        return PackedTensor(
            source,
            words,
            scales,
            Zeros(zeros, packed_axis=1, added=self.added),
            packing.bits,
            (out, inputs),
            packing.group if packing.group > 0 else inputs,
            packed_axis=0,
            transposed=True,
            indices=indices,
        )


def gptq(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(without_nulls(config, _Fields), _Fields)
    layout = fields.checkpoint_format or fields.format
    require_one_of("quantization_config's checkpoint_format", layout, tuple(LAYOUTS))
    require(not fields.is_marlin_format, "GPTQ in Marlin's layout is not supported")
    usual = Packing(fields.bits, group_size(fields.group_size))
    modules = packings(usual, fields.dynamic, bits=BITS, method="gptq", layout=layout)
    return GPTQ(modules, LAYOUTS[layout], fields.desc_act)
