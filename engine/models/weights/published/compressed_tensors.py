"""compressed-tensors, as llm-compressor writes it: int8, FP8, and int4 packed into int32."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.requirements import Count, require, require_one_of
from engine.models.weights.published.int8_inputs import Int8Inputs
from engine.models.weights.published.packed import WORD, PackedTensor, Zeros, matrix
from engine.models.weights.published.stored import (
    FLOATS8,
    Block,
    Format,
    QuantisedTensor,
    companion,
    scaled_tensor,
)
from engine.models.weights.sources.tensor_source import TensorSource

FORMATS = (None, "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")
NUMBERS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "FP8"}
WORDS = "_packed"


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    group_size: Annotated[int, msgspec.Meta(lt=2**31)] | None = None
    block_structure: tuple[Count, Count] | None = None


class _Inputs(msgspec.Struct):
    num_bits: int | None = None
    type: str | None = None
    symmetric: bool | None = None
    strategy: str | None = None
    dynamic: bool | str | None = None

    @property
    def is_int8(self) -> bool:
        """Whether each token is quantised by itself, as it comes, to symmetric int8."""
        return self == _Inputs(8, "int", symmetric=True, strategy="token", dynamic=True)


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    format: str | None = None
    targets: list[str] = []
    input_activations: _Inputs | None = None

    @property
    def has_int8_inputs(self) -> bool:
        return self.input_activations is not None and self.input_activations.is_int8


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _Fields(msgspec.Struct):
    """Its keys in ``quantization_config``."""

    config_groups: dict[str, _Group] = {}
    ignore: list[str] | None = None
    format: str | None = None
    sparsity_config: _Sparsity | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class CompressedTensors:
    """A Format."""

    description: str
    bits: int
    blocks: tuple[Block, ...]
    packings: tuple[tuple[int, int | None], ...]
    """Bits and group sizes of packed weights; None is all inputs."""
    int8_inputs: Int8Inputs | None = None
    """The modules that it was made for with inputs in 8 bits, if there are such."""

    def tensors(self, source: TensorSource) -> dict[str, QuantisedTensor]:
        """See Format."""
        found: dict[str, QuantisedTensor] = {}
        for name in source.names:
            if name.endswith(f".weight{WORDS}"):
                found[name.removesuffix(WORDS)] = self._packed(source, name.removesuffix(WORDS))
            elif source.info(name).stored_as in (*FLOATS8, "I8") and name.endswith(".weight"):
                scales = companion(source, name, f"{name}_scale")
                found[name] = scaled_tensor(source, name, scales, self.blocks, _present(source, f"{name}_zero_point"))
        return found

    def _packed(self, source: TensorSource, name: str) -> QuantisedTensor:
        """The tensor in the packing of the config with which its stored shapes agree."""
        words, scales = f"{name}{WORDS}", companion(source, name, f"{name}_scale")
        out, packed = matrix(source, words)
        zeros, indices = _present(source, f"{name}_zero_point"), _present(source, f"{name}_g_idx")
        is_packed = zeros is not None and source.info(zeros).stored_as == "I32"
        faults = []
        for bits, group in self.packings:
            middle = 2 ** (bits - 1)
            zero = Zeros(zeros, 0 if is_packed else None, 0 if is_packed or zeros is None else middle)
            if zeros is None:
                zero = Zeros(added=middle)
            shape, unread = (out, packed * WORD // bits), _present(source, f"{name}_shape")
            try:
                return PackedTensor(
                    source,
                    words,
                    scales,
                    zero,
                    bits,
                    shape,
                    group or shape[1],
                    indices=indices,
                    unread=(unread,) if unread else (),
                )
            except ConfigurationError as error:
                faults.append(error)
        raise (
            faults[0]
            if faults
            else ConfigurationError(
                f"{source.origin}: {words} is packed, but quantization_config has no weights of 4 or 8 bits"
            )
        )


def _present(source: TensorSource, name: str) -> str | None:
    return name if name in source.names else None


def compressed_tensors(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(config, _Fields)
    require(not fields.transform_config, "quantization_config's transform_config is not supported")
    sparsity = fields.sparsity_config.format if fields.sparsity_config else "dense"
    require_one_of("quantization_config's sparsity_config", sparsity, ("dense",))
    for form in (fields.format, *(group.format for group in fields.config_groups.values())):
        require_one_of("quantization_config's format", form, FORMATS)
    groups = [group for group in fields.config_groups.values() if group.weights is not None]
    schemes = [group.weights for group in groups if group.weights is not None]
    require(bool(schemes), "quantization_config's config_groups have no weights")
    for scheme in schemes:
        require(
            (scheme.type, scheme.num_bits) in NUMBERS,
            f"quantization_config has weights of {scheme.num_bits} bits of type {scheme.type}; supported are "
            f"{', '.join(NUMBERS.values())}",
        )
    int8_inputs = Int8Inputs(
        tuple((tuple(group.targets), group.has_int8_inputs) for group in groups), tuple(fields.ignore or ())
    )
    return _format(schemes, int8_inputs if any(group.has_int8_inputs for group in groups) else None)


def _format(schemes: list[_Weights], int8_inputs: Int8Inputs | None) -> CompressedTensors:
    blocks = [scheme.block_structure or (1, scheme.group_size or 0) for scheme in schemes]
    packings = [(scheme.num_bits, scheme.group_size) for scheme in schemes if scheme.type == "int"]
    kinds = dict.fromkeys(NUMBERS[scheme.type, scheme.num_bits] for scheme in schemes)
    return CompressedTensors(
        f"compressed-tensors of {' and '.join(kinds)}",
        min(scheme.num_bits for scheme in schemes),
        tuple(dict.fromkeys(block for block in blocks if block[1] > 0)),
        tuple(dict.fromkeys((bits, group if group and group > 0 else None) for bits, group in packings)),
        int8_inputs,
    )


def int8_inputs(published: Format | None) -> Int8Inputs | None:
    """The modules that a checkpoint was made for with inputs in 8 bits, if there are such."""
    return published.int8_inputs if isinstance(published, CompressedTensors) else None
