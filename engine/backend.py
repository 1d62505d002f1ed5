"""Which operations serve on this machine's device: XLA's own, or kernels of ours where we have them."""

from dataclasses import dataclass

import jax

from caching import attention, cpu_attention
from caching.attention import PagedAttention
from caching.cpu_kernels import KernelsUnavailable
from engine.models.decoder import Decoder
from engine.models.linear import panel_width


@dataclass(frozen=True)
class Backend:
    """What a step is made of."""

    attention: PagedAttention
    packs: bool
    """Weights are packed for the CPU's own matrix products."""
    description: str
    """For people."""

    def prepare(self, decoder: Decoder) -> None:
        """Bring a decoder's weights into the form that its steps read."""
        if self.packs:
            decoder.pack()


XLA = Backend(attention.paged_attention, packs=False, description="XLA's operations")


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
