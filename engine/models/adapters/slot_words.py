"""A kernel's factors in the slots of a CPU: the words that engine/models/cpu/adapters.cc reads.

They are a header, ``a`` of all parts side by side and ``b`` of each part, in panels; the last panel
of ``a`` is half as wide where that suffices. Of each part they have the ranks that are not zeros,
and nothing of a part without an adapter. Factors whose numbers bfloat16 has, as published ones
mostly are, are in bfloat16: half as much is read, and it is exact. What is left of a slot is not
read.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from caching.cpu_kernels import KernelsUnavailable, load, register
from engine.cpu_libraries import ADAPTERS
from engine.errors import ConfigurationError
from engine.models.weights import panels

HEADER = 16
"""Words: the bytes of a number, 0 of a kernel without an adapter, and each part's rank."""
WORD = np.dtype(np.int32)


def num_words(rank: int, inputs: int, outputs: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """The words of parts with so many outputs, all of ``rank`` in ``dtype``.

    Raises ConfigurationError if this machine cannot compile the kernel.
    """
    _register()
    assert len(outputs) < HEADER
    half = panels.panel_width() // 2
    of_a = -(-len(outputs) * rank // half) * half * inputs
    of_b = sum(int(np.prod(panels.panels_shape(out, rank))) for out in outputs)
    return HEADER + (of_a + of_b) * dtype.itemsize // WORD.itemsize


def slot_words(a: NDArray[Any], b: list[NDArray[Any]], words: int) -> NDArray[np.int32]:
    """f[parts, rank, in] and f[rank, its outputs] of each part -> i32[words]."""
    ranks = [_rank(low, high) for low, high in zip(a, b, strict=True)]
    found = np.zeros(words, WORD)
    if not any(ranks):
        return found
    low = np.concatenate([part[:rank] for part, rank in zip(a, ranks, strict=True)])
    high = [part[:rank].T for part, rank in zip(b, ranks, strict=True) if rank]
    factors = [*_low_in_panels(low.astype(np.float32)), *(panels.in_panels(part.astype(np.float32)) for part in high)]
    numbers = np.concatenate([factor.reshape(-1) for factor in factors])
    narrow = numbers.astype(jnp.bfloat16)
    stored = narrow if np.array_equal(narrow.astype(np.float32), numbers) else numbers
    content = stored.view(WORD)
    found[: 1 + len(ranks)] = stored.itemsize, *ranks
    found[HEADER : HEADER + len(content)] = content
    return found


def add_adapters(products: Array, x: Array, slots: Array, words: Array, runs: tuple[int, ...]) -> Array:
    """``products`` f32[T, out] of x f[T, in] by a kernel, with those of each row's adapter added.

    i32[T] ``slots`` are those of ``words`` i32[slots, words], or -1: such rows stay as they are.
    The kernel has ``runs`` of outputs of each of its parts, one after the other, and again.
    """
    shape = jax.ShapeDtypeStruct(products.shape, np.float32)
    call = jax.ffi.ffi_call("odriver_add_adapters", shape, input_output_aliases={0: 0})
    added: Array = call(products, x.astype(np.float32), slots, words, np.array(runs, np.int32))
    return added


@cache
def _register() -> None:
    try:
        register(load(ADAPTERS), "odriver_add_adapters")
    except KernelsUnavailable as error:
        raise ConfigurationError(f"adapters need a kernel of their own on a CPU: {error}") from error


def _low_in_panels(low: NDArray[Any]) -> list[NDArray[Any]]:
    """f[rank of all parts, in] -> whole panels, and [in, the width of a panel or half of it] of what
    is left, zero-padded."""
    width = panels.panel_width()
    whole, half = len(low) - len(low) % width, width // 2
    last = np.pad(low[whole:], ((0, -len(low) % half), (0, 0))).T
    return [panels.in_panels(low[:whole]), last] if whole else [last]


def _rank(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Up to where f[rank, in] and f[rank, out] are both not zeros."""
    used = np.flatnonzero(a.any(axis=1) & b.any(axis=1))
    return 0 if used.size == 0 else int(used[-1]) + 1
