"""StepShapes: what is compiled, and that every step fits it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caching.metadata import PagedAttentionCacheMetaData
from engine.execution_manager import StepShapes


def build_shapes(*, max_num_seqs=4, budget=16, max_model_len=100, page_size=16):
    """Shapes over a pool that does not matter."""
    pool = PagedAttentionCacheMetaData(
        num_layers=1, num_pages=9, page_size=page_size, num_kv_heads=1, head_dim=2, dtype=np.dtype(np.float32)
    )
    return StepShapes(max_num_seqs, budget, max_model_len, pool)


@pytest.mark.parametrize(
    ("budget", "buckets"), [(1, [1]), (2, [1, 2]), (16, [1, 2, 4, 8, 16]), (21, [1, 2, 4, 8, 16, 21])]
)
def test_buckets_are_powers_of_two_from_one_and_the_budget(budget, buckets):
    """A lone decoding row costs a bucket of one token (an ancestor's smallest was 256), a full budget no more than itself."""
    assert build_shapes(budget=budget).buckets == buckets


@given(st.integers(1, 20), st.integers(0, 50), st.data())
def test_every_step_fits_the_bucket_that_holds_its_tokens(max_num_seqs, extra_budget, data):
    """The smallest bucket for a step's tokens has rows for as many sequences as it can hold."""
    shapes = build_shapes(max_num_seqs=max_num_seqs, budget=max_num_seqs + extra_budget)
    tokens = data.draw(st.integers(1, max_num_seqs + extra_budget))
    rows = data.draw(st.integers(1, min(tokens, max_num_seqs)))

    layout = shapes.layout(next(bucket for bucket in shapes.buckets if bucket >= tokens))

    assert layout.tokens >= tokens and layout.rows >= rows


@pytest.mark.parametrize(("max_model_len", "pages"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_a_page_table_is_as_wide_as_the_longest_sequence(max_model_len, pages):
    """pages_per_seq counts a page that is only begun."""
    assert build_shapes(max_model_len=max_model_len).pages_per_seq == pages
