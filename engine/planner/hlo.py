"""Compiled programs, read from the text that XLA prints of them (``jax.stages.Compiled.as_text``).

Only this text has an absent chip's program with its memory spaces, and jax has no parser for it.
It lists computations with an instruction per line, each defined before its first use::

    %fused_computation.4 (param_0: bf16[128256,4096], param_1: s32[64]) -> bf16[64,4096] {
      %param_0 = bf16[128256,4096]{1,0:T(8,128)(2,1)} parameter(0)
      ...
      ROOT %gather.31 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} gather(%param_0, %param_1), ...
    }
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = re.compile(r"(ENTRY )?%([^ ]+) \(.*\{$")
INSTRUCTION = re.compile(r"  (ROOT )?%([^ ]+) = ")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
"""``bf16[64,4096]{1,0:T(8,128)(2,1)S(1)}``: dtype, shape, minor-to-major axes, tiles and space."""
TILE = re.compile(r"^T\(([\d,]+)\)")
SPACE = re.compile(r"S\((\d+)\)")
NAME = re.compile(r"%([\w.\-]+)")
BITS = re.compile(r"(\d+)")
ORIGIN = re.compile(r'op_name="([^"]*)"')
HBM = 0
"""The default memory space. 1 is a chip's VMEM; the others are smaller still."""


@dataclass(frozen=True)
class Buffer:
    """An array of a program."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """With the padding of its tiles."""
    space: int

    @property
    def numbers(self) -> int:
        """Its element count."""
        return math.prod(self.shape)

    @property
    def hbm_bytes(self) -> int:
        """Bytes in HBM; 0 if it is in another memory."""
        return self.nbytes if self.space == HBM else 0


@dataclass(frozen=True)
class Instruction:
    """One operation. Names are without ``%``."""

    name: str
    opcode: str
    buffers: tuple[Buffer, ...]
    """Its result; a tuple's leaves, in order."""
    argument: str
    """In its parentheses: operand names, or a literal as in ``constant(7)``, ``parameter(0)``."""
    attributes: str
    origin: str = ""
    """Where JAX traced it: ``jit(step)/while/body/psum``. Empty if the text does not say."""

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return NAME.findall(self.argument)

    def attribute(self, name: str) -> str | None:
        """The value of an attribute such as ``body=%region_1.5`` or ``index=2``."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def called(self) -> str:
        """The computation that a fusion, a call or an asynchronous operation runs."""
        return self.attribute("calls") or self.attribute("to_apply") or ""


@dataclass(frozen=True)
class Computation:
    """Instructions, each after its operands."""

    instructions: dict[str, Instruction]
    root: Instruction

    def parameter(self, index: int) -> Instruction | None:
        """A parameter by number; None if the computation does not use it."""
        found = (one for one in self if one.opcode == "parameter" and one.argument == str(index))
        return next(found, None)

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read ``name``."""
        return [one for one in self if name in one.operands]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]


@dataclass(frozen=True)
class Program:
    """All computations by name, and the entry computation."""

    computations: dict[str, Computation]
    entry: Computation


EMPTY = Program({}, Computation({}, Instruction("", "tuple", (), "", "")))
"""A program without instructions."""


def parse_program(text: str) -> Program:
    """Parse the text of a compiled program. Raises ValueError if it is not one."""
    computations: dict[str, Computation] = {}
    lines: list[str] = []
    entry, name = "", ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line == "}" and name:
            computations[name] = _parse_computation(lines)
            name = ""
        elif name and INSTRUCTION.match(line):
            lines.append(line)
    if entry not in computations:
        raise ValueError(f"no compiled program: {text[:80]!r}")
    return Program(computations, computations[entry])


def _parse_computation(lines: list[str]) -> Computation:
    instructions = {}
    for line in lines:
        one = _parse_instruction(line)
        instructions[one.name] = one
        if line.startswith("  ROOT "):
            root = one
    return Computation(instructions, root)


def _parse_instruction(line: str) -> Instruction:
    start = INSTRUCTION.match(line)
    assert start is not None
    made = start.end()
    end = _closing(line, made) if line[made] == "(" else line.index(" ", made)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    attributes, _, metadata = line[closing:].partition(", metadata=")
    origin = ORIGIN.search(metadata)
    return Instruction(
        name=start[2],
        opcode=line[end:opening].strip(),
        buffers=tuple(_parse_buffer(*found) for found in ARRAY.findall(line[made:end])),
        argument=line[opening + 1 : closing - 1],
        attributes=attributes,
        origin=origin[1] if origin else "",
    )


def _closing(line: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at ``opening``."""
    depth = 0
    for place in range(opening, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"a parenthesis is not closed: {line[:80]!r}")


def _parse_buffer(dtype: str, shape: str, order: str, layout: str) -> Buffer:
    axes = _numbers(shape)
    tile, space = TILE.match(layout), SPACE.search(layout)
    return Buffer(
        dtype=dtype,
        shape=axes,
        nbytes=_padded_size(axes, _numbers(order), _numbers(tile[1]) if tile else ()) * _bits(dtype) // 8,
        space=int(space[1]) if space else HBM,
    )


def _padded_size(axes: tuple[int, ...], order: tuple[int, ...], tile: tuple[int, ...]) -> int:
    """Elements, with minor axes padded to whole tiles. A rank below a tile's is not padded."""
    if len(tile) > len(axes) or len(order) != len(axes):
        return math.prod(axes)
    padded = list(axes)
    for axis, size in zip(order, reversed(tile), strict=False):
        padded[axis] = -(-padded[axis] // size) * size
    return math.prod(padded)


def _bits(dtype: str) -> int:
    """Bits of an element: ``bf16``, ``s32``, ``f8e4m3fn``; a bool takes a byte, a token none."""
    if dtype == "pred":
        return 8
    found = BITS.search(dtype)
    return int(found[1]) if found else 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
