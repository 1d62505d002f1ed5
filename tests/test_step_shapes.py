"""StepShapes: what is compiled, and that every step fits it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caching.metadata import PagedAttentionCacheMetaData
from engine.step.step_shapes import StepShapes, covering_buckets, token_buckets


def build_shapes(*, max_num_seqs=4, budget=16, max_model_len=100, page_size=16):
    """Shapes over a pool that does not matter."""
    pool = PagedAttentionCacheMetaData(
        num_layers=1, num_pages=9, page_size=page_size, num_kv_heads=1, head_dim=2, dtype=np.dtype(np.float32)
    )
    return StepShapes(max_num_seqs, budget, max_model_len, pool)


def bucket_for(shapes, tokens):
    """The size a step of so many tokens is padded to."""
    return next(bucket for bucket in shapes.buckets if bucket >= tokens)


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "buckets"),
    [
        (1, 1, [1]),
        (2, 2, [1, 2]),
        (5, 21, [1, 2, 3, 4, 5, 6, 8, 12, 16, 21]),
        (64, 512, [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512]),
    ],
)
def test_buckets_are_close_for_decodes_and_coarser_for_chunks(max_num_seqs, budget, buckets):
    """A lone decoding row costs a bucket of one token (an ancestor's smallest was 256), a full budget no more than itself."""
    assert build_shapes(max_num_seqs=max_num_seqs, budget=budget).buckets == buckets


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "buckets"),
    [
        (64, 512, [16, 32, 64, 96, 128, 192, 256, 384, 512]),
        (100, 300, [16, 32, 64, 100, 128, 192, 256, 300]),
        (4, 8, [8]),
    ],
)
def test_where_few_tokens_take_as_long_as_one_there_are_fewer_buckets(max_num_seqs, budget, buckets):
    """An accelerator waits for the weights: padding up to 16 is free, beyond it next to free."""
    assert token_buckets(max_num_seqs, budget, 16) == buckets


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "buckets", "rows"),
    [
        (1, 1, [1], {1}),
        (5, 21, [1, 2, 4, 8, 16, 21], {1, 4, 5}),
        (64, 512, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], {1, 4, 16, 64}),
    ],
)
def test_where_padding_is_skipped_buckets_are_powers_of_two(max_num_seqs, budget, buckets, rows):
    """Fewer are compiled, and their samplers have powers of four; what steps cost is told apart as finely as ever."""
    closer = build_shapes(max_num_seqs=max_num_seqs, budget=budget)
    shapes = replace(closer, skips_padding=True)

    assert shapes.buckets == buckets and {shapes.layout(bucket).rows for bucket in buckets} == rows
    assert shapes.cost_sizes == closer.buckets


@pytest.mark.parametrize(
    ("tokens", "max_num_seqs", "smallest_step", "rows"),
    [
        (1, 64, 1, [1]),
        (8, 64, 1, [8]),
        (12, 64, 1, [0, 8, 12]),
        (512, 64, 1, [0, 8, 16, 32, 64]),
        (512, 100, 1, [0, 8, 16, 32, 64, 100]),
        (512, 100, 16, [0, 100]),
    ],
)
def test_logits_are_computed_of_no_more_rows_than_twice_those_that_need_them(tokens, max_num_seqs, smallest_step, rows):
    """A prompt's chunk needs none or one; few cost as much as one, and an accelerator reads the head for all or for none."""
    layout = build_shapes(max_num_seqs=max_num_seqs, budget=512).layout(tokens)

    assert layout.logit_rows(smallest_step) == rows


@pytest.mark.parametrize("max_num_seqs", [*range(1, 70), 100, 127, 128, 129, 256, 1000])
def test_less_than_a_quarter_of_a_decoding_step_is_padding(max_num_seqs):
    """Whatever number of rows decodes; powers of two have no padding at all."""
    shapes = build_shapes(max_num_seqs=max_num_seqs, budget=max_num_seqs + 7)

    for rows in range(1, max_num_seqs + 1):
        bucket = bucket_for(shapes, rows)
        assert (bucket - rows) / bucket < 1 / 4
        assert bucket == rows or rows & (rows - 1)


@pytest.mark.parametrize("budget", [128, 512, 2048, 3000])
def test_less_than_a_third_of_a_step_with_a_chunk_is_padding(budget):
    """For prompts of any length from max_num_seqs up."""
    shapes = build_shapes(max_num_seqs=64, budget=budget)

    assert all((bucket_for(shapes, n) - n) / bucket_for(shapes, n) < 1 / 3 for n in range(65, budget + 1))


def test_the_number_of_buckets_grows_with_the_logarithm_of_the_sizes():
    """Each is a compilation of seconds: three for each doubling of the rows, two for each of the budget beyond them."""
    assert len(build_shapes(max_num_seqs=256, budget=8192).buckets) == 3 + 3 * 6 + 1 + 2 * 5


@given(st.integers(1, 20), st.integers(0, 50), st.data())
def test_every_step_fits_the_bucket_that_holds_its_tokens(max_num_seqs, extra_budget, data):
    """The smallest bucket for a step's tokens has rows for as many sequences as it can hold, and a sampler for them."""
    shapes = build_shapes(max_num_seqs=max_num_seqs, budget=max_num_seqs + extra_budget)
    tokens = data.draw(st.integers(1, max_num_seqs + extra_budget))
    rows = data.draw(st.integers(1, min(tokens, max_num_seqs)))

    layout = shapes.layout(bucket_for(shapes, tokens))

    assert layout.tokens >= tokens and layout.rows >= layout.model_rows >= rows
    assert layout.rows <= max_num_seqs and layout.rows < 2 * min(layout.tokens, max_num_seqs)


def test_buckets_share_samplers():
    """A sampler has a power of two of rows, or all, so that its variants are compiled for few sizes."""
    shapes = build_shapes(max_num_seqs=50, budget=256)

    assert {shapes.layout(bucket).rows for bucket in shapes.buckets} == {1, 2, 4, 8, 16, 32, 50}


@given(st.integers(1, 300), st.integers(0, 4000))
def test_few_buckets_cover_every_step(max_num_seqs, extra_budget):
    """The covering ones are among the buckets, the largest of all is one, and none is far from the next."""
    buckets = token_buckets(max_num_seqs, max_num_seqs + extra_budget, 1)

    covering = covering_buckets(buckets)

    assert covering[-1] == buckets[-1] and set(covering) <= set(buckets)
    assert all(8 * small <= large < 8 * 2 * small for small, large in pairwise(covering))
    assert covering[0] < 8


@pytest.mark.parametrize(("max_model_len", "pages"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_a_page_table_is_as_wide_as_the_longest_sequence(max_model_len, pages):
    """pages_per_seq counts a page that is only begun."""
    assert build_shapes(max_model_len=max_model_len).pages_per_seq == pages
