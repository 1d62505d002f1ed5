"""compressed-tensors, as llm-compressor writes it: int8, FP8, and int4 packed into int32."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.requirements import Count, require, require_one_of
from engine.models.weights.published.int8_inputs import Int8Inputs
from engine.models.weights.published.packed import WORD, PackedTensor, Zeros, matrix
from engine.models.weights.published.quantised_tensor import (
    UNQUANTISED,
    Format,
    QuantisedTensor,
    companion,
    companion_if_any,
    read_whole,
)
from engine.models.weights.published.scaled import FLOATS8, Block, scaled_tensor
from engine.models.weights.sources.tensor_source import TensorSource

FORMATS = (None, "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")
NUMBERS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "FP8"}
WORDS = "_packed"
BY_ACTIVATION = ("group", "dynamic", True)
"""Values of ``actorder`` for which ``weight_g_idx`` has the group of each input."""
TEXT_BLOCK = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})")


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    actorder: str | bool | None = None
    group_size: Annotated[int, msgspec.Meta(lt=2**31)] | None = None
    block_structure: tuple[Count, Count] | str | None = None
    """Its older form is ``128x128``."""

    @property
    def block(self) -> Block:
        """What shares a scale; of 0 columns unless there are blocks or groups. Raises UnsupportedError."""
        block = self.block_structure
        if isinstance(block, str):
            sizes = TEXT_BLOCK.fullmatch(block)
            require(sizes is not None, f"quantization_config's block_structure {block[:80]!r} is not like 128x128")
            assert sizes is not None
            block = int(sizes[1]), int(sizes[2])
        return block or (1, self.group_size or 0)


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
    targets: list[str] | None = None
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
    kv_cache_scheme: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class CompressedTensors:
    """A Format."""

    description: str
    bits: int
    blocks: tuple[Block, ...]
    packings: tuple[tuple[int, int | None], ...]
    """Bits and group sizes of packed weights; None is all inputs."""
    has_zeros: bool = False
    """Whether all weights are asymmetric."""
    by_activation: bool = False
    """Whether groups of all weights are made in the order of activations, and not of inputs."""
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
                found[name] = scaled_tensor(source, name, scales, self.blocks, self._zeros(source, name))
        return found

    def _zeros(self, source: TensorSource, name: str) -> str | None:
        return companion_if_any(source, name, f"{name}_zero_point", required=self.has_zeros)

    def _packed(self, source: TensorSource, name: str) -> QuantisedTensor:
        """The tensor in the packing of the config with which its stored shapes agree.

        Raises ConfigurationError, as it does for the first packing, if there is none.
        """
        if not self.packings:
            raise ConfigurationError(
                f"{source.origin}: {name}{WORDS} is packed, but quantization_config has no weights of 4 or 8 bits"
            )
        faults, fits = [], []
        for bits, group in self.packings:
            try:
                fits.append(self._in_packing(source, name, bits, group))
            except ConfigurationError as error:
                faults.append(error)
        if not fits:
            raise faults[0]
        shape = f"{name}_shape"
        if len(fits) > 1 and shape in source.names:
            stored = tuple(read_whole(source, shape).tolist())
            fits = [tensor for tensor in fits if tensor.shape == stored] or fits
        return fits[0]

    def _in_packing(self, source: TensorSource, name: str, bits: int, group: int | None) -> PackedTensor:
        """Raises ConfigurationError if stored shapes do not agree."""
        words, scales = f"{name}{WORDS}", companion(source, name, f"{name}_scale")
        out, packed = matrix(source, words)
        zeros, middle = self._zeros(source, name), 2 ** (bits - 1)
        if zeros is None:
            zero = Zeros(added=middle)
        elif source.info(zeros).stored_as == "I32":
            zero = Zeros(zeros, packed_axis=0)
        else:
            zero = Zeros(zeros, added=middle)
        shape, unread = (out, packed * WORD // bits), companion_if_any(source, name, f"{name}_shape")
        return PackedTensor(
            source,
            words,
            scales,
            zero,
            bits,
            shape,
            group or shape[1],
            indices=companion_if_any(source, name, f"{name}_g_idx", required=self.by_activation),
            unread=(unread,) if unread else (),
        )


def compressed_tensors(config: dict[str, Any]) -> Format:
    """The Format of a ``quantization_config``. Raises UnsupportedError."""
    fields = msgspec.convert(config, _Fields)
    require(
        not any((fields.transform_config or {}).values()), "quantization_config's transform_config is not supported"
    )
    sparsity = fields.sparsity_config.format if fields.sparsity_config else "dense"
    require_one_of("quantization_config's sparsity_config", sparsity, ("dense",))
    for form in (fields.format, *(group.format for group in fields.config_groups.values())):
        require_one_of("quantization_config's format", form, FORMATS)
    groups = [group for group in fields.config_groups.values() if group.weights is not None]
    schemes = [group.weights for group in groups if group.weights is not None]
    if not fields.config_groups and fields.kv_cache_scheme:
        return CompressedTensors("compressed-tensors of keys and values alone", UNQUANTISED, (), ())
    require(bool(schemes), "quantization_config's config_groups have no weights")
    for scheme in schemes:
        require(
            (scheme.type, scheme.num_bits) in NUMBERS,
            f"quantization_config has weights of {scheme.num_bits} bits of type {scheme.type}; supported are "
            f"{', '.join(NUMBERS.values())}",
        )
    int8_inputs = Int8Inputs(
        tuple((tuple(group.targets or ()), group.has_int8_inputs) for group in groups), tuple(fields.ignore or ())
    )
    return _format(schemes, int8_inputs if any(group.has_int8_inputs for group in groups) else None)


def _format(schemes: list[_Weights], int8_inputs: Int8Inputs | None) -> CompressedTensors:
    blocks = [scheme.block for scheme in schemes]
    packings = [(scheme.num_bits, scheme.group_size) for scheme in schemes if scheme.type == "int"]
    kinds = dict.fromkeys(NUMBERS[scheme.type, scheme.num_bits] for scheme in schemes)
    return CompressedTensors(
        f"compressed-tensors of {' and '.join(kinds)}",
        min(scheme.num_bits for scheme in schemes),
        tuple(dict.fromkeys(block for block in blocks if block[1] > 0)),
        tuple(dict.fromkeys((bits, group if group and group > 0 else None) for bits, group in packings)),
        not any(scheme.symmetric for scheme in schemes),
        all(scheme.actorder in BY_ACTIVATION for scheme in schemes),
        int8_inputs,
    )


def int8_inputs(published: Format | None) -> Int8Inputs | None:
    """The modules that a checkpoint was made for with inputs in 8 bits, if there are such."""
    return published.int8_inputs if isinstance(published, CompressedTensors) else None
