"""What the compiler made of a step: what it takes, what it copies, what chips say to each other, and what it moves."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import msgspec
from jax.stages import Lowered

from engine.hlo import Buffer, Instruction, Program, parse_program
from engine.hlo_traffic import Collective, Moved, Traffic, count_traffic
from engine.model_step import scratch_bytes

LARGE = 2**20
"""Bytes from which on an array is looked for among the copies."""


class Exchange(msgspec.Struct, frozen=True):
    """Collectives of one kind in a step."""

    kind: str
    per_layer: float
    besides: int
    """Before and after the layers."""
    nbytes: int
    """In all, of what each chip gives or has in the end."""


class CompiledBucket(msgspec.Struct, frozen=True):
    """What the compiler says of a step of so many tokens."""

    tokens: int
    compile_seconds: float
    scratch_bytes: int
    """What it takes beside weights and pages."""
    copies: list[str]
    """Instructions that write anew into HBM what is as large as a layer's weight or pages; there should be none."""
    gathers: list[str]
    """Those that bring to each chip what other chips have of one; there should be none."""
    exchanges: list[Exchange]


@dataclass(frozen=True)
class StepArrays:
    """What weights and pages are on one chip, to know them again in a program."""

    weights: tuple[jax.ShapeDtypeStruct, ...]
    pages: tuple[jax.ShapeDtypeStruct, ...]
    num_layers: int
    chips: int = 1

    def sizes(self, chips: int) -> set[int]:
        """Numbers that a weight or pages have, and one layer's of them, if so many chips' are put together."""
        return {
            size * chips
            for leaf in (*self.weights, *self.pages)
            for size in (leaf.size, leaf.size // self._layers_in(leaf))
            if size * leaf.dtype.itemsize >= LARGE
        }

    def are_pages(self, buffer: Buffer) -> bool:
        """Whether that is an array of pages."""
        return any(buffer.numbers == leaf.size for leaf in self.pages)

    def _layers_in(self, leaf: jax.ShapeDtypeStruct) -> int:
        stacked = leaf.shape[0] % self.num_layers == 0 and len(leaf.shape) > 2
        return self.num_layers if stacked else 1


class CompiledStep:
    """A program, and what there is to say of it."""

    def __init__(self, tokens: int, lowered: Lowered, arrays: StepArrays) -> None:
        begun = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - begun
        self._arrays = arrays
        self._program: Program = parse_program(compiled.as_text() or "")
        traffic = count_traffic(self._program)
        self.bucket = CompiledBucket(
            tokens=tokens,
            compile_seconds=seconds,
            scratch_bytes=scratch_bytes(compiled),
            copies=[_described(one.instruction, one.times) for one in traffic.copies(arrays.sizes(1))],
            gathers=[
                f"{one.kind} of {one.nbytes:,} bytes, {one.times} times"
                for one in traffic.gathers({size for chips in (1, arrays.chips) for size in arrays.sizes(chips)})
            ],
            exchanges=_exchanges(traffic, arrays.num_layers),
        )

    def moved(self, pages_read: int) -> Moved:
        """What one step moves, if its attention reads so many bytes of each layer's pages."""

        def attention(call: Instruction, operands: list[Buffer]) -> Moved | None:
            if not any(map(self._arrays.are_pages, operands)):
                return None
            others = _not_pages(operands, self._arrays), _not_pages(call.buffers, self._arrays)
            return Moved(pages_read + others[0], others[1])

        return count_traffic(self._program, attention).moved


def _not_pages(buffers: Iterable[Buffer], arrays: StepArrays) -> int:
    return sum(buffer.hbm_bytes for buffer in buffers if not arrays.are_pages(buffer))


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
