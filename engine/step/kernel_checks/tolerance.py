"""How far a kernel's results may be from those that they are held against."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np

EXACT, ROUNDED = 1e-3, 0.1
"""The largest difference from a twin whose results are about 1: in float32, and where inputs or
products are rounded to fewer bits. A key too many, or of another row, makes a difference of 1."""


def tolerance_of(kv_dtype: np.dtype, dtype: np.dtype) -> float:
    """EXACT or ROUNDED, by the dtypes of pages and activations."""
    is_narrow = kv_dtype.itemsize < 4 or dtype.itemsize < 4
    return ROUNDED if is_narrow or jax.default_backend() != "cpu" else EXACT


def difference(expected: Mapping[str, np.ndarray], results: Iterable[np.ndarray | jax.Array]) -> str | None:
    """The first of a kernel's results that is not numpy's, by name."""
    for (name, right), found in zip(expected.items(), results, strict=True):
        error = np.abs(np.asarray(found) - right).max()  # NaN of any
        if not error <= EXACT:
            return f"{name} differs from numpy's by {error:.3g}, more than {EXACT:g}"
    return None
