"""Which step sizes are compiled. Padding is counted as (bucket - tokens) / bucket: the share of a step that is for nothing.

Up to ``max_num_seqs`` a step may be all decodes, the same size step after step, so the sizes lie as close as {4, 5, 6} x 2^k:
less than a quarter of any such step is padding, and powers of two have none. Beyond it a step has a prompt's chunk in it,
and while prompts wait it has the whole budget; only a prompt's last chunk is padded. There {2, 3} x 2^k must do, which
keeps it under a third: every size costs a compilation, of seconds where the model is large.
"""

DECODE_MANTISSAS = (4, 5, 6)
CHUNK_MANTISSAS = (2, 3)
SMALLEST = (1, 2, 3)
COVERING_RATIO = 8
"""How much larger than its own bucket the one may be that a step runs in while that is not compiled yet."""


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int, smallest: int = 1) -> list[int]:
    """The token counts of the compiled steps, ascending; the last is the budget.

    ``smallest`` is above 1 where a step of less takes as long, because it is weights that are waited for: there padding
    costs next to nothing, and decoding steps are powers of two.
    """
    most = max(max_num_seqs, smallest)
    closer = {*SMALLEST, *_sizes(DECODE_MANTISSAS, max_num_batched_tokens)}
    decodes = _sizes((1,), max_num_batched_tokens) if smallest > 1 else closer
    chunks = _sizes(CHUNK_MANTISSAS, max_num_batched_tokens)
    kept = {size for size in decodes if smallest <= size <= most} | {most} | {size for size in chunks if size > most}
    return sorted({size for size in kept if size <= max_num_batched_tokens} | {max_num_batched_tokens})


def covering_buckets(buckets: list[int]) -> list[int]:
    """Few of the buckets in which every step can run, ascending: the largest, and from it down one of each magnitude."""
    covering = [buckets[-1]]
    for bucket in reversed(buckets):
        if bucket * COVERING_RATIO <= covering[0]:
            covering.insert(0, bucket)
    return covering


def sampling_rows(tokens: int, max_num_seqs: int) -> int:
    """The rows that the sampler of a bucket has: a power of two, or all.

    Samplers cost seconds to compile too, in several variants, and far less than a step to run: up to half of their
    rows may be padding.
    """
    return min(1 << (tokens - 1).bit_length(), max_num_seqs)


def _sizes(mantissas: tuple[int, ...], largest: int) -> set[int]:
    return {mantissa << exponent for mantissa in mantissas for exponent in range(largest.bit_length())}
