"""Tests of the CPU's kernels are skipped where these cannot be built."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from caching.cpu_kernels import KernelsUnavailable


@contextmanager
def kernels_needed() -> Iterator[None]:
    """Of what prepares kernels: the test, or the module, is skipped where there are none."""
    try:
        yield
    except KernelsUnavailable as unavailable:
        pytest.skip(str(unavailable), allow_module_level=True)
