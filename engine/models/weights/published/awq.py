"""AWQ (Lin et al. 2023): 4 bits in groups with zeros, as AutoAWQ's "gemm" layout packs them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import require, require_one_of, without_nulls
from engine.models.weights.published.packed import WORD, WORDS, PackedFormat, PackedTensor, Zeros, matrix
from engine.models.weights.published.packings import Packing, group_size, packings
from engine.models.weights.published.quantised_tensor import Format, companion
from engine.models.weights.sources.tensor_source import TensorSource

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its 8 outputs: it is packed from outputs 0, 2, 4, 6, 1, 3, 5, 7."""
BITS = (4,)


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``; the older names are AutoAWQ's own."""

    bits: int | None = None
    w_bit: int = 4
    group_size: int | None = None
    q_group_size: int = 128
    zero_point: bool = True
    version: str | None = None
    format: str = "gemm"
    """transformers' and GPTQModel's name of ``version``."""
    backend: str | None = None
    dynamic: dict[str, Any] | None = None


@dataclass(frozen=True)
class AWQ(PackedFormat):
    """A Format."""

    @property
    def description(self) -> str:
        """See Format."""
        return f"AWQ{self.packings.usual.in_words}"

    def _tensor(self, source: TensorSource, name: str, packing: Packing) -> PackedTensor:
        words = f"{name}{WORDS}"
        scales, zeros = (companion(source, words, f"{name}.{part}") for part in ("scales", "qzeros"))
        inputs, packed = matrix(source, words)
        shape = packed * WORD // packing.bits, inputs
        return PackedTensor(
            source,
            words,
            scales,
            Zeros(zeros, packed_axis=1),
            packing.bits,
            shape,
            packing.group if packing.group > 0 else inputs,
            transposed=True,
            order=ORDER,
        )


def awq(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(without_nulls(config, _Fields), _Fields)
    layout = (fields.version or fields.format).lower()
    require_one_of("quantization_config's version", layout, ("gemm",))
    require(fields.backend != "llm-awq", "AWQ in llm-awq's layout is not supported")
    require(fields.zero_point, "AWQ without zero_point is not supported")
    usual = Packing(fields.bits or fields.w_bit, group_size(fields.group_size or fields.q_group_size))
    return AWQ(packings(usual, fields.dynamic, bits=BITS, method="awq", layout=layout))
