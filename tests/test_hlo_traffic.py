"""What compiled programs move, by hand and as XLA makes them for a v5e (``tests/programs``, compiled with libtpu 0.0.52).

Both of those are three layers under a scan on two chips, of 512 wide and 4,096 deep, with pages that each layer writes 8 rows
into: ``scanned.hlo`` as it should be, ``copying.hlo`` with pages that are not donated and a weight that is gathered.
"""

from pathlib import Path

import pytest

from engine.planner.hlo import parse_program
from engine.planner.hlo_traffic import Moved, count_traffic

PROGRAMS = Path(__file__).parent / "programs"
ROW = "{1,0:T(8,128)}"


def program(*entry, before=""):
    """A program of these instructions, the last its result."""
    lines = [f"  {'ROOT ' if place == len(entry) - 1 else ''}{line}" for place, line in enumerate(entry)]
    return parse_program("\n".join(["HloModule jit_step", before, "ENTRY %main (x: f32[8]) -> f32[8] {", *lines, "}"]))


def computation(name, *body):
    """Another one, to stand before the entry."""
    lines = [f"  {'ROOT ' if place == len(body) - 1 else ''}{line}" for place, line in enumerate(body)]
    return "\n".join([f"%{name} (x: f32[8]) -> f32[8] {{", *lines, "}", ""])


def moved(*entry, before=""):
    """What it moves."""
    return count_traffic(program(*entry, before=before)).moved


def traffic_of(name):
    """Of one of the compiled programs."""
    return count_traffic(parse_program((PROGRAMS / f"{name}.hlo").read_text()))


def test_a_scanned_program_reads_each_layers_slices_once():
    """Weights by the layer and not by the stack, rows of pages, and the table of logits; pages are written in place."""
    traffic = traffic_of("scanned")
    layer, table, rows = 2 * 512 * 2048 * 2 + 128 * 2048 * 2, 4096 * 512 * 2, 8 * 2 * 128 * 2

    assert traffic.moved.read == pytest.approx(3 * (layer + rows) + table, rel=1e-3)
    assert traffic.moved.written == pytest.approx(3 * rows + 8 * 4096 * 4, rel=1e-3)
    assert traffic.unbounded == []
    assert [(one.kind, one.times, one.depth) for one in traffic.collectives] == [("all-reduce", 3, 1)]


def test_a_sum_in_a_loop_of_one_turn_is_in_a_loop():
    """XLA has no loop for a layer that is alone of its kind, but says where the sum is from."""
    summed = (
        '%{0} = f32[8]{{0}} all-reduce(%x), to_apply=%add, metadata={{op_name="jit(step)/{1}psum" stack_frame_id=1}}'
    )
    entry = "%x = f32[8]{0} parameter(0)", summed.format("a", ""), summed.format("b", "while/body/closed_call/")

    traffic = count_traffic(program(*entry))

    assert [one.depth for one in traffic.collectives] == [0, 1]


def test_what_is_copied_and_gathered_is_found():
    """Pages on their way in that were not donated, and each layer's weight; not the prefetch of the table into the chip."""
    pages, weight = 12288 * 2 * 128, 512 * 4096
    sizes = {pages, weight, 4096 * 512}

    copying, scanned = traffic_of("copying"), traffic_of("scanned")

    assert [one.instruction.opcode for one in copying.copies(sizes)] == ["copy-start"]
    assert [(one.kind, one.times, one.nbytes) for one in copying.gathers(sizes)] == [("all-gather", 3, 2 * weight)]
    assert scanned.copies(sizes) == scanned.gathers(sizes) == []


def test_what_lies_within_the_chip_costs_nothing():
    """S(1) is its vector memory; what is begun is counted there, not where it is awaited."""
    assert moved(
        f"%x = f32[8,128]{ROW} parameter(0)",
        f"%begun = (f32[8,128]{{1,0:T(8,128)S(1)}}, f32[8,128]{ROW}, u32[]{{:S(2)}}) copy-start(%x)",
        "%near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%begun)",
        f"%far = f32[8,128]{ROW} add(%near, %near)",
    ) == Moved(4096, 4096)


def test_arrays_are_padded_to_whole_tiles():
    """3 rows of 100 numbers lie in a tile of 8 by 128, by the order of the layout."""
    assert moved(f"%x = f32[3,100]{ROW} parameter(0)", f"%y = f32[3,100]{ROW} negate(%x)") == Moved(4096, 4096)
    assert moved(
        "%x = bf16[200,3]{0,1:T(4,128)(2,1)} parameter(0)", '%y = s32[] custom-call(%x), custom_call_target="f"'
    ) == Moved(2 * 4 * 256, 4)


def test_a_slice_that_is_cut_and_written_in_a_fusion_counts_alone():
    """One row of a hundred is read, and one is written, though both arrays are operands and one is the result."""
    fused = computation(
        "fused",
        f"%p0 = f32[800,128]{ROW} parameter(0)",
        f"%p1 = f32[800,128]{ROW} parameter(1)",
        "%p2 = s32[] parameter(2)",
        f"%cut = f32[8,128]{ROW} dynamic-slice(%p0, %p2, %p2), dynamic_slice_sizes={{8,128}}",
        f"%more = f32[8,128]{ROW} negate(%cut)",
        f"%put = f32[800,128]{ROW} dynamic-update-slice(%p1, %more, %p2, %p2)",
    )

    assert moved(
        f"%x = f32[800,128]{ROW} parameter(0)",
        f"%y = f32[800,128]{ROW} parameter(1)",
        "%i = s32[]{:T(128)S(6)} parameter(2)",
        f"%z = f32[800,128]{ROW} fusion(%x, %y, %i), kind=kLoop, calls=%fused",
        before=fused,
    ) == Moved(4096, 4096)


def loop(condition, step="1"):
    """A program that reads 4,096 bytes in each turn of a loop from 2 on."""
    carried = f"(s32[]{{:T(128)}}, f32[8,128]{ROW}, s32[]{{:T(128)}})"
    before = computation(
        "body",
        f"%carry = {carried} parameter(0)",
        "%i = s32[]{:T(128)S(6)} get-tuple-element(%carry), index=0",
        f"%x = f32[8,128]{ROW} get-tuple-element(%carry), index=1",
        f"%one = s32[]{{:T(128)S(6)}} constant({step})",
        "%next = s32[]{:S(6)} add(%i, %one)",
        "%seen = f32[8,128]{1,0:T(8,128)S(1)} negate(%x)",
        f"%again = {carried} tuple(%next, %x, %one)",
    ) + computation("condition", f"%before = {carried} parameter(0)", *condition)
    return count_traffic(
        program(
            f"%p = f32[8,128]{ROW} parameter(0)",
            "%zero = s32[]{:S(6)} constant(2)",
            "%last = s32[]{:S(6)} constant(12)",
            f"%first = {carried} tuple(%zero, %p, %last)",
            f"%loop = {carried} while(%first), condition=%condition, body=%body",
            before=before,
        )
    )


def test_a_loop_counts_by_its_turns():
    """To a constant, or to one that is handed from turn to turn, in steps of whatever the body adds."""
    counter = "%at = s32[]{:S(6)} get-tuple-element(%before), index=0"
    known = (counter, "%end = s32[]{:S(6)} constant(12)", "%go = pred[]{:S(6)} compare(%at, %end), direction=LT")
    handed = (counter, "%end = s32[]{:S(6)} get-tuple-element(%before), index=2", known[-1])

    assert loop(known).moved == loop(handed).moved == Moved(10 * 4096)
    assert loop(known, step="4").moved == Moved(3 * 4096)


def test_a_loop_that_ends_by_data_is_named():
    """And counted once."""
    traffic = loop(("%go = pred[]{:S(6)} get-tuple-element(%before), index=3",))

    assert (traffic.moved, traffic.unbounded) == (Moved(4096), ["loop"])


def test_of_branches_the_dearest_counts():
    """Whichever is taken."""
    branches = computation(
        "dear", f"%a = f32[8,128]{ROW} parameter(0)", f"%b = f32[8,128]{ROW} negate(%a)"
    ) + computation("cheap", f"%a = f32[8,128]{ROW} parameter(0)")

    assert moved(
        "%i = s32[]{:S(6)} parameter(0)",
        f"%x = f32[8,128]{ROW} parameter(1)",
        f"%y = f32[8,128]{ROW} conditional(%i, %x, %x), branch_computations={{%cheap, %dear}}",
        before=branches,
    ) == Moved(4096, 4096)


def test_a_kernel_moves_what_the_caller_says():
    """By default all that it is given and gives."""
    call = program(
        f"%x = f32[80,128]{ROW} parameter(0)",
        f'%y = f32[8,128]{ROW} custom-call(%x), custom_call_target="tpu_custom_call"',
    )

    assert count_traffic(call).moved == Moved(40960, 4096)
    assert count_traffic(call, lambda one, operands: Moved(operands[0].nbytes // 10, 7)).moved == Moved(4096, 7)


def test_what_a_kernel_writes_in_place_is_no_copy():
    """A result in the memory of an operand is not written anew; other results of the kernel are."""
    call = program(
        f"%x = f32[80,128]{ROW} parameter(0)",
        f"%q = f32[8,128]{ROW} parameter(1)",
        f'%y = (f32[80,128]{ROW}, f32[8,128]{ROW}) custom-call(%q, %x), custom_call_target="tpu_custom_call", '
        "output_to_operand_aliasing={{0}: (1, {})}",
    )

    assert count_traffic(call).moved == Moved(4096, 4096)
    assert count_traffic(call).copies({80 * 128}) == []


def test_collectives_that_are_begun_and_awaited_count_once():
    """Of each kind, with what every chip has in the end; also inside of a fusion."""
    fused = computation(
        "fused", f"%a = f32[16,128]{ROW} parameter(0)", f"%b = f32[8,128]{ROW} reduce-scatter(%a), to_apply=%add"
    )
    traffic = count_traffic(
        program(
            f"%x = f32[8,128]{ROW} parameter(0)",
            f"%g = (f32[8,128]{ROW}, f32[16,128]{ROW}) all-gather-start(%x), dimensions={{0}}",
            f"%gathered = f32[16,128]{ROW} all-gather-done(%g)",
            f"%r = f32[16,128]{ROW} all-reduce-start(%gathered), to_apply=%add",
            f"%reduced = f32[16,128]{ROW} all-reduce-done(%r)",
            f"%y = f32[8,128]{ROW} fusion(%reduced), kind=kCustom, calls=%fused",
            before=fused,
        )
    )

    assert [(one.kind, one.nbytes) for one in traffic.collectives] == [
        ("all-gather", 8192), ("all-reduce", 8192), ("reduce-scatter", 8192)
    ]  # fmt: skip
    assert traffic.moved == Moved(4096 + 8192 + 8192, 8192 + 8192 + 4096)


def test_what_is_no_program_is_refused():
    """With its beginning."""
    with pytest.raises(ValueError, match="no compiled program: 'module @jit_step"):
        parse_program("module @jit_step {}")
