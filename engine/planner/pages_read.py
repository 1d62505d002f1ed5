"""What attention reads of the pages of a sequence, as the kernel does it: whole blocks, and none before a window."""

from dataclasses import replace

from engine.models.layers.mixer import State
from engine.planner.chip_fit import ChipFit
from engine.step.step_shapes import StepShapes


def pages_read(fit: ChipFit, shapes: StepShapes, tokens: int, queries: int = 1) -> list[int]:
    """Bytes, for each layer with attention, of a chip's pages of a sequence of ``tokens`` tokens.

    The last ``queries`` of them are the step's: a window skips the pages before what the first one sees.
    """
    cache = shapes.cache
    token = replace(cache, of_draft=None).bytes_per_page // (cache.num_layers * cache.page_size)
    read = []
    for mixer in fit.partition.model.mixers:
        if not isinstance(cached := mixer.cached, State):
            skipped = max(0, tokens - queries + 1 - (cached.reach or tokens)) // cache.page_size * cache.page_size
            read.append(token * fit.kernel.tokens_read(fit.chip, cache, shapes.pages_per_seq, tokens - skipped))
    return read


def of_call(read: list[int]) -> int:
    """Bytes of a call of the kernel, on average: a program's text does not say which layers a call is for."""
    return sum(read) // len(read)
