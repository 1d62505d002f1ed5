"""A compiled function: its scratch memory, copies, collectives and memory traffic."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import msgspec
from jax.errors import JaxRuntimeError
from jax.stages import Compiled

from engine.models.layers.experts import ExpertsSpec
from engine.planner.experts_read import share_read
from engine.planner.hlo import EMPTY, Buffer, Instruction, parse_program
from engine.planner.hlo_traffic import Collective, Kernel, Moved, Traffic, Transfer, count_traffic
from engine.step.compilation import Compilation, scratch_bytes

LARGE = 2**20
"""Arrays of at least so many bytes are looked for among the copies."""


class Exchange(msgspec.Struct, frozen=True):
    """A function's collectives of one kind."""

    kind: str
    per_layer: float
    besides: int
    """Outside the layers."""
    nbytes: int
    """In total, the larger of a chip's operands and results."""


class CompiledFunction(msgspec.Struct, frozen=True):
    """The compiler's report on one function."""

    name: str
    """``step``, or a program between logits and tokens."""
    size: int
    """Tokens of a step, otherwise rows."""
    compile_seconds: float
    scratch_bytes: int
    """Memory besides weights and pages."""
    readable: bool
    """Whether the program's text is available. If not, the fields below are empty."""
    copies: list[str]
    """Instructions that copy an array as large as a layer's weight or pages; ideally none."""
    gathers: list[str]
    """Collectives that gather such an array or the logits on each chip; ideally none."""
    exchanges: list[Exchange]


@dataclass(frozen=True)
class ExpertStack:
    """The experts of several layers in one array [layers, experts, ...], which products read."""

    array: jax.ShapeDtypeStruct
    spec: ExpertsSpec

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of a chip's part."""
        return _part(self.array)

    @property
    def chips(self) -> int:
        """Chips that it is split over."""
        whole: int = math.prod(self.array.shape)
        return whole // math.prod(self.part)

    def read(self, buffer: Buffer, tokens: int) -> int:
        """Bytes of the buffer that has it that one layer's product of a step reads."""
        return int(buffer.hbm_bytes // self.part[0] * share_read(self.spec, tokens, self.chips))


@dataclass(frozen=True)
class LargeArrays:
    """Weights, pages and logits, by whose sizes a program's buffers are recognized."""

    weights: tuple[jax.ShapeDtypeStruct, ...]
    """Of layers that repeat, [repeats, ...]."""
    pages: tuple[jax.ShapeDtypeStruct, ...]
    """And states, those of all layers one after the other."""
    logits: jax.ShapeDtypeStruct
    num_layers: int
    experts: tuple[ExpertStack, ...]
    pool_sizes: tuple[int, ...] = ()
    """The pages that a layer has, and the slots of states."""

    @property
    def parts(self) -> set[int]:
        """Element counts of a chip's shards of weights and pages, whole and per layer."""
        return self._numbers(*([_part(leaf) for leaf in leaves] for leaves in (self.weights, self.pages)))

    @property
    def wholes(self) -> set[int]:
        """Element counts of whole weights and pages, whole and per layer, and of the logits."""
        every = ([leaf.shape for leaf in leaves] for leaves in (self.weights, self.pages))
        return self._numbers(*every) | {math.prod(self.logits.shape)}

    def are_pages(self, buffer: Buffer) -> bool:
        """Whether a buffer is a chip's shard of the pages."""
        return any(buffer.numbers == math.prod(_part(leaf)) for leaf in self.pages)

    def are_activations(self, results: Iterable[Buffer], tokens: int) -> bool:
        """Whether results have a row per token of the step, and are not its logits: a step with
        adapters gathers the residual stream."""
        logits = math.prod(self.logits.shape)
        return all(buffer.shape[:1] == (tokens,) and buffer.numbers != logits for buffer in results)

    def are_new_logits(self, one: Transfer) -> bool:
        """Whether it computes a chip's part of the logits, which may be as many numbers as a
        weight, or writes them from VMEM. A copy in HBM reads as much as it writes."""
        written = {buffer.shape for buffer in one.instruction.buffers if buffer.hbm_bytes}
        return one.moved.read != one.moved.written and written == {_part(self.logits)}

    def experts_in(self, buffer: Buffer) -> ExpertStack | None:
        """The experts that a buffer has, of all layers of their stack: gates and ups of a layer are as
        many numbers as what goes down in two."""
        found = [stack for stack in self.experts if buffer.numbers == math.prod(stack.part)]
        return min(found, key=lambda stack: buffer.shape[0] != math.prod(stack.part[:2]), default=None)

    def _numbers(self, weights: list[tuple[int, ...]], pages: list[tuple[int, ...]]) -> set[int]:
        layers = [shape[1:] for shape in weights]
        layers += [(size, *shape[1:]) for shape in pages for size in self.pool_sizes if shape[0] % size == 0]
        return {size for shape in (*weights, *pages, *layers) if (size := math.prod(shape)) * 2 >= LARGE}


class CompiledProgram:
    """A function's program and the report on it."""

    def __init__(self, compilation: Compilation, arrays: LargeArrays) -> None:
        self._arrays = arrays
        text = _text(compilation.compiled)
        self._program = parse_program(text) if text else EMPTY
        traffic = self.traffic(0, compilation.size)
        self.report = CompiledFunction(
            name=compilation.function,
            size=compilation.size,
            compile_seconds=compilation.seconds,
            scratch_bytes=scratch_bytes(compilation.compiled),
            readable=text is not None,
            copies=[
                _described(one.instruction, one.times)
                for one in traffic.copies(arrays.parts)
                if not _has_row_for_each(one.instruction, compilation.size) and not arrays.are_new_logits(one)
            ],
            gathers=[
                f"{one.kind} of {one.nbytes:,} bytes, {one.times} times"
                for one in traffic.gathers(arrays.parts | arrays.wholes)
                if not arrays.are_activations(one.buffers, compilation.size)
            ],
            exchanges=_exchanges(traffic, arrays.num_layers),
        )

    def traffic(self, pages_read: int, tokens: int) -> Traffic:
        """Its memory traffic, if attention reads ``pages_read`` bytes of each layer's pages.

        Of a step's ``tokens`` each chooses its experts.
        """
        return count_traffic(self._program, self._kernels(pages_read, tokens))

    def _kernels(self, pages_read: int, tokens: int) -> Kernel:
        def moved(call: Instruction, operands: list[Buffer]) -> Moved | None:
            if any(map(self._arrays.are_pages, operands)):
                return Moved(pages_read + self._others(operands), self._others(call.buffers))
            stacks = [(stack, buffer) for buffer in operands if (stack := self._arrays.experts_in(buffer))]
            if not stacks:
                return None
            others = sum(buffer.hbm_bytes for buffer in operands if not self._arrays.experts_in(buffer))
            read = sum(stack.read(buffer, tokens) for stack, buffer in stacks)
            return Moved(read + others, sum(buffer.hbm_bytes for buffer in call.buffers))

        return moved

    def _others(self, buffers: Iterable[Buffer]) -> int:
        return sum(buffer.hbm_bytes for buffer in buffers if not self._arrays.are_pages(buffer))


def _text(compiled: Compiled) -> str | None:
    """The program's text; None if jaxlib cannot convert libtpu's.

    jaxlib 0.10 does not know the multi-operand asynchronous operations of libtpu 0.0.52 (v6e).
    """
    try:
        return compiled.as_text()
    except JaxRuntimeError as error:
        if "async-update" not in str(error):
            raise
        return None


def _part(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of a chip's shard of an array."""
    return tuple(leaf.sharding.shard_shape(leaf.shape)) if leaf.sharding else leaf.shape


def _has_row_for_each(one: Instruction, tokens: int) -> bool:
    """Whether its results have a row per token of the step, which may be as large as a weight."""
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
