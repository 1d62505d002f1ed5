"""The HBM and inter-chip traffic of a compiled program, summed over its instructions.

XLA's own count (``cost_analysis``) is of no use: on a TPU it counts traffic within the chip as
traffic to memory. A scheduled program's layouts name each array's memory, so the sum is simple:
the bytes that an instruction reads or writes in HBM, times the trips of its loops. A slice counts
as its own size, and an in-place update as the size of the update. The text lacks the trip counts
of loops that depend on data, and the reads of our kernels, which the caller supplies.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from engine.planner.hlo import HBM, Buffer, Computation, Instruction, Program

Kernel = Callable[[Instruction, list[Buffer]], "Moved | None"]
"""The traffic of a custom call, by its operands. None counts every buffer that is not aliased."""

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "opt-barrier", "optimization-barrier", "async-update", "async-done", "copy-done", "slice-done", "send-done", "recv-done",
    *(f"{name}-done" for name in COLLECTIVES),
}  # fmt: skip
"""Instructions that move nothing, or that were counted at their start."""
FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"}
CUTS = {"dynamic-slice", "slice", "gather", "slice-start", "dynamic-slice-start"}
"""They read as much of their first operand as their result holds."""
VIEWS = {"bitcast", "reshape", "transpose", "copy", "convert", "get-tuple-element"}
"""In a fusion these read only what their users read."""
SHARED = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
"""A custom call's result and the operand it aliases. The kernel knows how much of it is moved."""
ALIASING = "output_to_operand_aliasing"
"""In a fusion, marks another one whose result aliases its operand in a different layout."""
LOOP = "while/body"
"""In an instruction's origin, a loop that JAX traced it in."""
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""They write into their first operand. The value is the number of the update's operand."""


@dataclass(frozen=True)
class Moved:
    """Bytes to and from HBM."""

    read: int = 0
    written: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.read + other.read, self.written + other.written)

    def __mul__(self, times: int) -> "Moved":
        return Moved(self.read * times, self.written * times)


@dataclass(frozen=True)
class Transfer:
    """The traffic of one instruction, and how often it runs."""

    instruction: Instruction
    moved: Moved
    """Per run."""
    times: int
    depth: int
    """Number of enclosing loops."""


@dataclass(frozen=True)
class Collective:
    """A collective between chips."""

    kind: str
    """One of COLLECTIVES."""
    nbytes: int
    """Per run, the larger of a chip's operands and results."""
    buffers: tuple[Buffer, ...]
    """The results on each chip."""
    times: int
    depth: int
    """Number of enclosing loops, with those of a single turn, of which XLA leaves the names alone."""


@dataclass
class Traffic:
    """The traffic of a whole program."""

    transfers: list[Transfer] = field(default_factory=list)
    """Instructions that move something."""
    collectives: list[Collective] = field(default_factory=list)
    unbounded: list[str] = field(default_factory=list)
    """Loops with unknown trip counts, counted as one trip."""

    @property
    def moved(self) -> Moved:
        """Bytes in total."""
        return sum((one.moved * one.times for one in self.transfers), Moved())

    def copies(self, sizes: Container[int]) -> list[Transfer]:
        """Transfers that write a new array to HBM with an element count in ``sizes``."""
        return [
            one
            for one in self.transfers
            if any(
                0 < buffer.hbm_bytes <= one.moved.written and buffer.numbers in sizes
                for buffer in one.instruction.buffers
            )
        ]

    def gathers(self, sizes: Container[int]) -> list[Collective]:
        """Collectives that gather an element count in ``sizes``; an all-reduce gathers nothing."""
        return [
            one
            for one in self.collectives
            if one.kind != "all-reduce" and any(buffer.numbers in sizes for buffer in one.buffers)
        ]


def count_traffic(program: Program, kernel: Kernel = lambda call, operands: None) -> Traffic:  # noqa: ARG005
    """Sum up the traffic of a program."""
    walk = _Walk(program, kernel, Traffic())
    walk.run(program.entry, 1, 0)
    return walk.traffic


@dataclass(frozen=True)
class _Walk:
    program: Program
    kernel: Kernel
    traffic: Traffic

    def run(self, computation: Computation, times: int, depth: int) -> None:
        for one in computation:
            if one.opcode == "while":
                self._loop(computation, one, times, depth)
            elif one.opcode == "conditional":
                self._branch(one, times, depth)
            elif one.opcode in ("call", "async-start"):
                self.run(self.program.computations[one.called], times, depth)
            elif one.opcode not in FREE:
                self._collect(one, computation, times, depth)
                if moved := self._moved(one, computation):
                    self.traffic.transfers.append(Transfer(one, moved, times, depth))

    def _loop(self, computation: Computation, loop: Instruction, times: int, depth: int) -> None:
        turns = count_turns(self.program, computation, loop)
        if turns is None:
            self.traffic.unbounded.append(loop.name)
        body = self.program.computations[loop.attribute("body") or ""]
        self.run(body, times * (1 if turns is None else turns), depth + 1)

    def _branch(self, conditional: Instruction, times: int, depth: int) -> None:
        """Count the branch with the most traffic."""
        names = re.findall(r"(?:true|false)_computation=%([\w.\-]+)", conditional.attributes)
        if listed := re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes):
            names = [name.strip().lstrip("%") for name in listed[1].split(",")]
        walks = [_Walk(self.program, self.kernel, Traffic()) for _ in names]
        for name, walk in zip(names, walks, strict=True):
            walk.run(self.program.computations[name], times, depth)
        most = max((walk.traffic for walk in walks), key=lambda each: each.moved.read + each.moved.written)
        self.traffic.transfers += most.transfers
        self.traffic.collectives += most.collectives
        self.traffic.unbounded += most.unbounded

    def _collect(self, one: Instruction, within: Computation, times: int, depth: int) -> None:
        """Record a collective, also one inside a fusion."""
        kind = next((kind for kind in COLLECTIVES if one.opcode in (kind, f"{kind}-start")), None)
        if kind is not None:
            given = [buffer for name in one.operands for buffer in within[name].buffers]
            made = one.buffers[len(given) :] if one.opcode.endswith("-start") and kind != "all-reduce" else one.buffers
            nbytes = max(sum(buffer.nbytes for buffer in given), sum(buffer.nbytes for buffer in made))
            loops = max(depth, one.origin.count(LOOP))
            self.traffic.collectives.append(Collective(kind, nbytes, tuple(made), times, loops))
        elif one.opcode == "fusion":
            fused = self.program.computations[one.called]
            for inner in fused:
                self._collect(inner, fused, times, depth)

    def _moved(self, one: Instruction, within: Computation) -> Moved | None:
        operands = [buffer for name in one.operands for buffer in within[name].buffers]
        if one.opcode == "custom-call":
            moved = self._custom_call(one, operands)
        elif one.opcode == "fusion":
            moved = self._fusion(one, within)
        elif one.opcode in IN_PLACE:
            update = within[one.operands[IN_PLACE[one.opcode]]].buffers[0]
            moved = Moved(
                sum(buffer.hbm_bytes for buffer in operands[1:]), update.nbytes * (one.buffers[0].space == HBM)
            )
        elif one.opcode in CUTS:
            cut = one.buffers[1] if one.opcode.endswith("-start") else one.buffers[0]
            rest = sum(buffer.hbm_bytes for buffer in operands[1:])
            moved = Moved((cut.nbytes if operands[0].space == HBM else 0) + rest, cut.hbm_bytes)
        elif one.opcode == "copy-start":
            moved = Moved(operands[0].hbm_bytes, one.buffers[0].hbm_bytes)
        elif one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
            made = one.buffers[len(operands) : 2 * len(operands)]  # operands, results, context
            moved = _all(operands, made)
        else:
            moved = _all(operands, one.buffers)
        return moved if moved.read or moved.written else None

    def _custom_call(self, call: Instruction, operands: list[Buffer]) -> Moved:
        if any(f'"{name}"' in call.attributes for name in FREE_CALLS):
            return Moved()
        shared = [(int(made or 0), int(given)) for made, given in SHARED.findall(call.attributes)]
        given, made = {given for _, given in shared}, {made for made, _ in shared}
        return self.kernel(call, operands) or _all(
            [buffer for index, buffer in enumerate(operands) if index not in given],
            tuple(buffer for index, buffer in enumerate(call.buffers) if index not in made),
        )

    def _fusion(self, fusion: Instruction, within: Computation) -> Moved:
        fused = self.program.computations[fusion.called]
        read = 0
        for index, name in enumerate(fusion.operands):
            parameter, buffer = fused.parameter(index), within[name].buffers[0]
            if parameter is not None and buffer.space == HBM:
                read += self._read_of(parameter.name, buffer.nbytes, fused)
        leaves = [fused[name] for name in fused.root.operands] if fused.root.opcode == "tuple" else [fused.root]
        written = sum(
            self._written_by(leaf, fused)
            for leaf, made in zip(leaves, fusion.buffers, strict=False)
            if made.space == HBM
        )
        return Moved(read, written)

    def _read_of(self, name: str, whole: int, fused: Computation) -> int:
        """Bytes that a fusion reads of one of its values."""
        return min(whole, sum(self._read_by(user, name, whole, fused) for user in fused.users(name)))

    def _read_by(self, user: Instruction, name: str, whole: int, fused: Computation) -> int:
        first = user.operands[0] == name
        if user.opcode in CUTS and first:
            return min(whole, user.buffers[0].nbytes)
        if user.opcode in IN_PLACE and first:
            return 0
        if user.opcode in VIEWS or (user.opcode == "fusion" and ALIASING in user.attributes):
            return whole if user is fused.root else self._read_of(user.name, whole, fused)
        if user.opcode == "tuple":
            return 0  # passed through
        if user.opcode == "fusion":
            inner = self.program.computations[user.called]
            parameter = inner.parameter(user.operands.index(name))
            return 0 if parameter is None else self._read_of(parameter.name, whole, inner)
        return whole

    def _written_by(self, leaf: Instruction, fused: Computation) -> int:
        """Bytes that a fusion writes of one of its results."""
        whole = leaf.buffers[0].nbytes
        while leaf.opcode == "bitcast":
            leaf = fused[leaf.operands[0]]
        if leaf.opcode in IN_PLACE:
            return fused[leaf.operands[IN_PLACE[leaf.opcode]]].buffers[0].nbytes
        if leaf.opcode == "fusion":
            inner = self.program.computations[leaf.called]
            return self._written_by(inner.root, inner)
        return 0 if leaf.opcode == "parameter" else whole


def _all(operands: list[Buffer], made: tuple[Buffer, ...]) -> Moved:
    return Moved(sum(buffer.hbm_bytes for buffer in operands), sum(buffer.hbm_bytes for buffer in made))


def count_turns(program: Program, within: Computation, loop: Instruction) -> int | None:
    """Trip count of a loop that counts up to a constant; None if it depends on data."""
    condition = program.computations[loop.attribute("condition") or ""]
    body = program.computations[loop.attribute("body") or ""]
    compared = condition.root
    if compared.opcode != "compare" or compared.attribute("direction") != "LT":
        return None
    counter, limit = (condition[name] for name in compared.operands)
    place = counter.attribute("index")
    if counter.opcode != "get-tuple-element" or place is None:
        return None
    first = within[loop.operands[0]].operands
    start, step = _constant(within, first[int(place)]), _step(body, int(place))
    last = _constant(condition, limit.name)
    if last is None and limit.opcode == "get-tuple-element":  # loop-carried
        last = _constant(within, first[int(limit.attribute("index") or 0)])
    if start is None or last is None:
        return None
    return max(0, -(-(last - start) // step))


def _step(body: Computation, place: int) -> int:
    """The increment of a counter: 1, unless the body has another."""
    grown = body[body.root.operands[place]]
    known = [_constant(body, name) for name in grown.operands] if grown.opcode == "add" else []
    return next((step for step in known if step), 1)


def _constant(computation: Computation, name: str) -> int | None:
    one = computation[name]
    while one.opcode in ("copy", "bitcast", "convert"):
        one = computation[one.operands[0]]
    return int(one.argument) if one.opcode == "constant" and one.argument.lstrip("-").isdigit() else None
