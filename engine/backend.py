"""Which operations serve on this machine's device: XLA's own, or kernels of ours where we have them."""

from dataclasses import dataclass
from typing import Protocol

import jax
from jax import Array

from caching import attention, cpu_attention
from caching.attention import PageTable
from caching.cpu_kernels import KernelsUnavailable
from engine.models.decoder import Decoder
from engine.models.linear import panel_width
from engine.models.rope import rotate


class RotaryAttention(Protocol):
    """One layer's attention over pages, rotary embedding included."""

    def __call__(
        self,
        kv_pages: Array,
        q: Array,
        k: Array,
        v: Array,
        cos: Array,
        sin: Array,
        table: PageTable,
        *,
        sm_scale: float,
        sliding_window: int | None,
    ) -> tuple[Array, Array]:
        """Turn q[T, heads, head_dim] and k, write k and v [T, kv_heads, head_dim], attend: the pages, and the like of q.

        How keys and values lie within a page is the backend's own affair.
        """


@dataclass(frozen=True)
class Backend:
    """What a step is made of."""

    attention: RotaryAttention
    packs: bool
    """Weights are packed for the CPU's own matrix products."""
    description: str
    """For people."""

    def prepare(self, decoder: Decoder) -> None:
        """Bring a decoder's weights into the form that its steps read."""
        if self.packs:
            decoder.pack()


def _by_xla(
    kv_pages: Array,
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    table: PageTable,
    *,
    sm_scale: float,
    sliding_window: int | None,
) -> tuple[Array, Array]:
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return attention.paged_attention(kv_pages, q, k, v, table, sm_scale=sm_scale, sliding_window=sliding_window)


XLA = Backend(_by_xla, packs=False, description="XLA's operations")


def choose_backend(page_size: int, head_dim: int) -> Backend:
    """The fastest that can serve such pages here; compiles kernels if that has not been done."""
    if jax.default_backend() != "cpu":
        return XLA
    try:
        panel_width()
        width = cpu_attention.vector_width()
    except KernelsUnavailable as unavailable:
        return Backend(XLA.attention, packs=False, description=f"{XLA.description}: {unavailable}")
    if page_size % width == 0 and head_dim % width == 0:
        return Backend(cpu_attention.paged_attention, packs=True, description="oDriver's CPU kernels")
    misfit = f"page_size {page_size} or head_dim {head_dim} is no multiple of {width}"
    return Backend(XLA.attention, packs=True, description=f"oDriver's CPU kernels, attention by XLA: {misfit}")
