"""AWQ (Lin et al. 2023): 4 bits in groups with zeros, as AutoAWQ's "gemm" layout packs them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.models.requirements import require, require_one_of, without_nulls
from engine.models.weights.published.packed import WORD, PackedTensor, Zeros, group_size, matrix, packed_weights
from engine.models.weights.published.stored import Format, QuantisedTensor, companion
from engine.models.weights.sources.tensor_source import TensorSource

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its 8 outputs: it is packed from outputs 0, 2, 4, 6, 1, 3, 5, 7."""
WORDS = ".qweight"


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``; the older names are AutoAWQ's own."""

    bits: int | None = None
    w_bit: int = 4
    group_size: int | None = None
    q_group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"


@dataclass(frozen=True)
class AWQ:
    """A Format."""

    group: int
    """-1 is all inputs."""
    bits: int = 4

    @property
    def description(self) -> str:
        """See Format."""
        return "AWQ" if self.group < 0 else f"AWQ in groups of {self.group}"

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format."""
        return packed_weights(source, WORDS, self._tensor)

    def _tensor(self, source: TensorSource, name: str) -> PackedTensor:
        words = f"{name}{WORDS}"
        scales, zeros = (companion(source, words, f"{name}.{part}") for part in ("scales", "qzeros"))
        inputs, packed = matrix(source, words)
        shape = packed * WORD // self.bits, inputs
        return PackedTensor(
            source,
            words,
            scales,
            Zeros(zeros, packed_axis=1),
            self.bits,
            shape,
            self.group if self.group > 0 else inputs,
            transposed=True,
            order=ORDER,
        )


def awq(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(without_nulls(config, _Fields), _Fields)
    require_one_of("quantization_config's bits", fields.bits or fields.w_bit, (4,))
    require_one_of("quantization_config's version", fields.version.lower(), ("gemm",))
    require(fields.zero_point, "AWQ without zero_point is not supported")
    return AWQ(group_size(fields.group_size or fields.q_group_size))
