"""What the compiler made of a function: what it takes, what it copies, what chips say to each other, and what it moves."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import msgspec
from jax.errors import JaxRuntimeError
from jax.stages import Compiled

from engine.planner.hlo import EMPTY, Buffer, Instruction, parse_program
from engine.planner.hlo_traffic import Collective, Kernel, Moved, Traffic, count_traffic
from engine.step.compilation import Compilation, scratch_bytes

LARGE = 2**20
"""Bytes from which on an array is looked for among the copies."""


class Exchange(msgspec.Struct, frozen=True):
    """Collectives of one kind that a function has."""

    kind: str
    per_layer: float
    besides: int
    """Before and after the layers."""
    nbytes: int
    """In all, of what each chip gives or has in the end."""


class CompiledFunction(msgspec.Struct, frozen=True):
    """What the compiler says of one."""

    name: str
    """``step``, or one of those between logits and tokens."""
    size: int
    """Tokens of a step, else rows."""
    compile_seconds: float
    scratch_bytes: int
    """What it takes beside weights and pages."""
    readable: bool
    """Whether the program could be had; where not, nothing below is known of it."""
    copies: list[str]
    """Instructions that write anew into HBM what is as large as a layer's weight or pages; there should be none."""
    gathers: list[str]
    """Those that bring to each chip what others have of these or of the logits; there should be none."""
    exchanges: list[Exchange]


@dataclass(frozen=True)
class LargeArrays:
    """Weights, pages and logits, to know them again in a program."""

    weights: tuple[jax.ShapeDtypeStruct, ...]
    pages: tuple[jax.ShapeDtypeStruct, ...]
    logits: jax.ShapeDtypeStruct
    num_layers: int

    @property
    def parts(self) -> set[int]:
        """Numbers that one chip has of weights and pages, and of those of a layer."""
        return self._numbers([_part(leaf) for leaf in (*self.weights, *self.pages)])

    @property
    def wholes(self) -> set[int]:
        """The same of all chips together, and of the logits."""
        return self._numbers([leaf.shape for leaf in (*self.weights, *self.pages)]) | {math.prod(self.logits.shape)}

    def are_pages(self, buffer: Buffer) -> bool:
        """Whether that is a chip's part of an array of pages."""
        return any(buffer.numbers == math.prod(_part(leaf)) for leaf in self.pages)

    def _numbers(self, shapes: list[tuple[int, ...]]) -> set[int]:
        layers = [(shape[0] // self.num_layers, *shape[1:]) for shape in shapes if shape[0] % self.num_layers == 0]
        return {size for shape in (*shapes, *layers) if (size := math.prod(shape)) * 2 >= LARGE}


class CompiledProgram:
    """A function's program, and what there is to say of it."""

    def __init__(self, compilation: Compilation, arrays: LargeArrays) -> None:
        self._arrays = arrays
        text = _text(compilation.compiled)
        self._program = parse_program(text) if text else EMPTY
        traffic = self.traffic(0)
        self.report = CompiledFunction(
            name=compilation.function,
            size=compilation.size,
            compile_seconds=compilation.seconds,
            scratch_bytes=scratch_bytes(compilation.compiled),
            readable=text is not None,
            copies=[
                _described(one.instruction, one.times)
                for one in traffic.copies(arrays.parts)
                if not _has_row_for_each(one.instruction, compilation.size)
            ],
            gathers=[
                f"{one.kind} of {one.nbytes:,} bytes, {one.times} times"
                for one in traffic.gathers(arrays.parts | arrays.wholes)
            ],
            exchanges=_exchanges(traffic, arrays.num_layers),
        )

    def traffic(self, pages_read: int) -> Traffic:
        """What it moves, if its attention reads so many bytes of each layer's pages."""
        return count_traffic(self._program, self._attention(pages_read))

    def _attention(self, pages_read: int) -> Kernel:
        def moved(call: Instruction, operands: list[Buffer]) -> Moved | None:
            if not any(map(self._arrays.are_pages, operands)):
                return None
            return Moved(pages_read + self._others(operands), self._others(call.buffers))

        return moved

    def _others(self, buffers: Iterable[Buffer]) -> int:
        return sum(buffer.hbm_bytes for buffer in buffers if not self._arrays.are_pages(buffer))


def _text(compiled: Compiled) -> str | None:
    """The program; None where jaxlib cannot make it of what libtpu gives.

    jaxlib 0.10 does not know the asynchronous operations of several operands that libtpu 0.0.52 has for a v6e.
    """
    try:
        return compiled.as_text()
    except JaxRuntimeError as error:
        if "async-update" not in str(error):
            raise
        return None


def _part(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of what one chip has of an array."""
    return tuple(leaf.sharding.shard_shape(leaf.shape)) if leaf.sharding else leaf.shape


def _has_row_for_each(one: Instruction, tokens: int) -> bool:
    """Whether it makes something of the step's own tokens, which may be as large as a weight."""
    return all(buffer.shape[:1] == (tokens,) for buffer in one.buffers if buffer.hbm_bytes)


def _exchanges(traffic: Traffic, num_layers: int) -> list[Exchange]:
    kinds: dict[str, list[Collective]] = defaultdict(list)
    for one in traffic.collectives:
        kinds[one.kind].append(one)
    return [
        Exchange(
            kind,
            sum(one.times for one in found if one.depth) / num_layers,
            sum(one.times for one in found if not one.depth),
            sum(one.times * one.nbytes for one in found),
        )
        for kind, found in kinds.items()
    ]


def _described(one: Instruction, times: int) -> str:
    made = ", ".join(f"{buffer.dtype}{list(buffer.shape)}" for buffer in one.buffers if buffer.hbm_bytes)
    return f"{one.name}: {made}, {times} times"
