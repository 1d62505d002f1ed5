"""The rooflines of a plan's steps: those that decode, and those of a prompt."""

from dataclasses import replace

from caching.state.ragged import BLOCK
from engine.models.head_specs import MTPHeadSpec
from engine.models.layers.mixer import State
from engine.planner.chip_fit import ChipFit
from engine.planner.compiled_function import CompiledProgram
from engine.planner.experts_read import expert_bytes, share_read
from engine.planner.hlo_traffic import Moved, Traffic
from engine.planner.ici import exchanges_seconds
from engine.planner.pages_read import of_call, pages_read
from engine.planner.roofline import DecodeStep, PromptStep, Roofline
from engine.step.forward_programs import FORWARD
from engine.step.sampling_programs import GREEDY
from engine.step.step_shapes import StepShapes


def batch_sizes(max_num_seqs: int, drafts: int, most_samples: int) -> list[int]:
    """Powers of four, and the maximum, as far as a step may sample a token of each sequence and of each of its drafts:
    ``most_samples`` tokens."""
    most = most_samples // (1 + drafts)
    sizes = {4**power for power in range(10) if 4**power < max_num_seqs} | {max_num_seqs}
    return sorted(size for size in sizes if size <= most)


def decode_steps(
    fit: ChipFit, programs: list[CompiledProgram], shapes: StepShapes, tokens: int, drafts: int = 0
) -> list[DecodeStep]:
    """Decoding steps with the greedy sampler, for each batch size whose pages fit in the pool.

    All tokens of a step with ``drafts`` for each sequence sample, of which there are at most
    ``most_samples``. A draft model reads its weights once for each of them, and once more; a draft
    head once for each, as the step feeds it.
    """
    is_head = fit.draft is not None and fit.draft.partition.model.head is not None
    slot = _bytes_in_loops(fit, shapes)
    roofline, pages = _roofline(fit, shapes), shapes.groups.pages_of(tokens)
    read = pages_read(fit, shapes, tokens, 1 + drafts)
    found = []
    for sequences in batch_sizes(shapes.max_num_seqs, drafts, shapes.most_samples):
        computed = sequences * (1 + drafts)
        if sequences * pages <= shapes.cache.num_usable_pages:
            step = _smallest(programs, FORWARD, computed).traffic(sequences * of_call(read), computed)
            sampler = _smallest(programs, GREEDY, computed).traffic(0, computed)
            states = max(0, sequences - BLOCK) * slot  # the compiled loop over blocks is counted as one trip
            keys = sequences * sum(read) if fit.kernel.loops else 0
            in_loops = Moved(states + keys, states)
            exchange, moved = _exchange_and_moved(roofline, in_loops, step, sampler)
            to_draft = (drafts + (not is_head)) * _read_of_draft(fit, roofline, sequences)
            found.append(roofline.step(sequences, tokens, moved, exchange, drafts, to_draft))
    return found


def _bytes_in_loops(fit: ChipFit, shapes: StepShapes) -> int:
    """Of a sequence's states those that steps read and write in loops over rows: what recurrences
    have, and not the windows of convolutions and how many tokens are in a slot."""
    pool = shapes.cache.states
    kept = next((cached for one in fit.partition.model.mixers if isinstance(cached := one.cached, State)), None)
    if pool is None or kept is None:
        return 0
    count = len(kept.arrays)
    looped = (*pool.arrays[1:count], *pool.arrays[count + 2 :])
    return replace(pool, arrays=looped).bytes_per_slot


def _read_of_draft(fit: ChipFit, roofline: Roofline, sequences: int) -> int:
    """Bytes of weights that a chip reads to draft a token for each sequence: of experts those that
    are chosen, and of the model's tables that of logits, if a head has none."""
    if fit.draft is None:
        return 0
    partition = fit.draft.partition
    unread = (
        nbytes * (1 - share_read(spec, sequences, partition.devices))
        for spec, nbytes in expert_bytes(partition, fit.draft.weight_format).items()
    )
    shared = roofline.table_bytes if isinstance(partition.model.head, MTPHeadSpec) else 0
    return fit.footprint.draft_bytes - int(sum(unread)) + shared


def prompt_steps(fit: ChipFit, programs: list[CompiledProgram], shapes: StepShapes, tokens: int) -> list[PromptStep]:
    """Steps of a prompt of so many tokens: the largest, and those from ``max_num_seqs`` on whose
    size is a power of two."""
    roofline = _roofline(fit, shapes)
    steps = {one.report.size: one for one in programs if one.report.name == FORWARD and one.report.readable}
    sizes = [size for size in sorted(steps) if size >= shapes.max_num_seqs and size.bit_count() == 1]
    found = []
    for size in dict.fromkeys([*sizes, *sorted(steps)[-1:]]):
        read = pages_read(fit, shapes, tokens, size)
        keys = sum(read) if fit.kernel.loops else 0
        exchange, moved = _exchange_and_moved(roofline, Moved(keys), steps[size].traffic(of_call(read), size))
        found.append(roofline.prompt(size, tokens, moved, exchange))
    return found


def _roofline(fit: ChipFit, shapes: StepShapes) -> Roofline:
    """Of a chip with its part of the model."""
    slot = shapes.cache.bytes_per_slot
    return Roofline(fit.chip, fit.partition, fit.weight_format, fit.kv_dtype, fit.footprint.weight_bytes, slot)


def _exchange_and_moved(roofline: Roofline, in_loops: Moved, *traffic: Traffic) -> tuple[float, Moved]:
    """Seconds of the exchanges between chips, and what a chip moves."""
    collectives = [one for each in traffic for one in each.collectives]
    seconds = exchanges_seconds(collectives, roofline.chip, roofline.partition.devices)
    return seconds, sum((each.moved for each in traffic), in_loops)


def _smallest(programs: list[CompiledProgram], name: str, rows: int) -> CompiledProgram:
    """The smallest compiled size that holds such a step."""
    found = [one for one in programs if one.report.name == name and one.report.size >= rows and one.report.readable]
    return min(found, key=lambda one: one.report.size)
