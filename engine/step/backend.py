"""Which operations serve on this machine's device: XLA's own, or kernels of ours where we have them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec

from caching.attention import cpu_attention
from caching.attention.cpu_attention import CPUAttention
from caching.attention.spec import AttentionKernel
from caching.attention.xla_attention import XLAAttention
from caching.cpu_kernels import KernelsUnavailable, load
from caching.instruction_set import UnknownInstructions
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu.tpu_chip import CHIPS, Chip
from caching.tpu.tpu_kernels import JAX, PALLAS, TPUKernel, by_bytes
from engine.errors import ConfigurationError
from engine.mesh import TP, DeviceMesh
from engine.models import linear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

CACHE = PartitionSpec(TP)
"""Each device has pages of its own, for its own kv heads: one behind the other, as if there were as many more."""


def _with_scales(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    return kv_heads, stored_head_dim(head_dim, dtype)


@dataclass(frozen=True)
class Backend:
    """What a step is made of."""

    attention: AttentionKernel
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache]
    packs: bool
    """Weights are packed for the CPU's own matrix products."""
    description: str
    """For people."""
    flattens: bool = False
    """Kernels are made matrices."""
    scans: bool = False
    """Layers that are alike are one program, gone through by ``lax.scan``; XLA:CPU would copy their weights first."""
    smallest_step: int = 1
    """Tokens below which a step takes no less time: an accelerator waits for the weights to be read."""
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]] = _with_scales
    """The kv_heads and head_dim that pages have for so many and so wide ones of a dtype."""
    holds_table: Callable[[int, int], bool] = lambda rows, pages_per_seq: True  # noqa: ARG005
    """Whether attention has room for the page table of so many rows, and pages of the longest."""

    def arrange(self, decoder: Decoder, activations: np.dtype | None = None) -> None:
        """Bring a decoder of shapes, before it is loaded, into the form that its steps read; of int8 if ``activations`` says
        what it is to compute in.
        """
        if self.flattens:
            decoder.flatten()
        if activations is not None:
            decoder.quantize(activations)
        if self.scans:
            decoder.stack()

    def prepare(self, decoder: Decoder) -> None:
        """Bring a loaded decoder's weights into the form that its steps read."""
        if self.packs:
            decoder.pack()

    def one_page(self, model: ModelConfig, page_size: int, dtype: np.dtype) -> PagedAttentionCacheMetaData:
        """The shape of a pool for a device's part of a model, of a single page."""
        own = model.stored_kv_heads // model.tensor_parallel_size
        kv_heads, head_dim = self.stored_heads(own, model.head_dim, dtype)
        return PagedAttentionCacheMetaData(
            num_layers=model.num_layers,
            num_pages=1,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            stacks=model.runs if self.scans else (),
        )

    def allocator(self, metadata: PagedAttentionCacheMetaData, mesh: DeviceMesh) -> Callable[[], PagedAttentionCache]:
        """Makes zeroed pages on every device; raises jax.errors.JaxRuntimeError where they do not fit."""
        return mesh.maker(mesh.on_each(partial(self.allocate, metadata), (), CACHE), *CACHE)

    def abstract_cache(self, metadata: PagedAttentionCacheMetaData, mesh: DeviceMesh) -> PagedAttentionCache:
        """Shapes and dtypes of what an ``allocator`` makes, to compile against."""
        cache: PagedAttentionCache = mesh.shapes(jax.eval_shape(self.allocator(metadata, mesh)), *CACHE)
        return cache


def xla_backend(kv_dtype: np.dtype) -> Backend:
    """XLA's operations, which serve on any device, over pages of a dtype."""
    return Backend(XLAAttention(kv_dtype), PagedAttentionCache.allocate, packs=False, description="XLA's operations")


SMALLEST_ACCELERATOR_STEP = 16
"""Rows of bfloat16 that a TPU's register holds; multiplying so many takes less than reading what they are multiplied by."""

PAGE_SIZE = 16
TPU_PAGE_SIZE = 128
"""There a page is one transfer of the attention kernel, which should not be small."""


def default_page_size() -> int:
    """Tokens in a page, where the operator does not say."""
    return TPU_PAGE_SIZE if jax.default_backend() == "tpu" else PAGE_SIZE


def tpu_backend(chip: Chip, kernel: TPUKernel) -> Backend:
    """An attention kernel for one kind of chip, and XLA for the rest."""
    return Backend(
        kernel.attention(chip),
        kernel.allocate,
        packs=False,
        description=f"XLA's operations, attention by {kernel.description}",
        flattens=True,
        scans=True,
        smallest_step=SMALLEST_ACCELERATOR_STEP,
        stored_heads=kernel.stored_heads,
        holds_table=kernel.holds_table,
    )


def tpu_kernel(
    chip: Chip, page_size: int, kv_heads: int, head_dim: int, kv_dtype: np.dtype, asked: str = "auto"
) -> TPUKernel:
    """The kernel that was asked for, or of those that can read such pages the one that moves fewest bytes.

    Raises ConfigurationError where there is none.
    """
    found = [
        kernel for kernel in by_bytes(chip, kv_heads, head_dim, page_size, kv_dtype) if asked in ("auto", kernel.name)
    ]
    misfits = [kernel.misfit(page_size, kv_dtype) for kernel in found]
    for kernel, misfit in zip(found, misfits, strict=True):
        if misfit is None:
            return kernel
    raise ConfigurationError(
        f"attention_backend {asked} cannot read such pages on a TPU: {misfits[0]}; choose xla, or for kv_cache_dtype fp8"
    )


def _compile_at_once() -> None:
    """The kernels' libraries, each on a core of its own."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, (linear.SOURCE, cpu_attention.SOURCE)))


def choose_backend(
    page_size: int,
    head_dim: int,
    kv_dtype: np.dtype,
    devices: int = 1,
    kv_heads: int = 1,
    attention_backend: str = "auto",
) -> Backend:
    """The fastest that can serve such pages here, on so many devices; compiles kernels if that has not been done.

    ``kv_heads`` are those of one device, ``attention_backend`` is what the operator wants. Raises ConfigurationError where
    none can.
    """
    platform, xla = jax.default_backend(), xla_backend(kv_dtype)
    kind = jax.devices()[0].device_kind
    if platform == "tpu" and attention_backend != "xla":
        if kind in CHIPS:
            chip = CHIPS[kind]
            return tpu_backend(chip, tpu_kernel(chip, page_size, kv_heads, head_dim, kv_dtype, attention_backend))
        xla = replace(xla, description=f"{xla.description}: the attention kernels are not set up for {kind}")
    if attention_backend in (PALLAS.name, JAX.name):
        raise ConfigurationError(
            f"attention_backend {attention_backend} is for {', '.join(CHIPS)}, not for {kind}: choose auto or xla"
        )
    if platform != "cpu":
        return replace(xla, scans=True, smallest_step=SMALLEST_ACCELERATOR_STEP)
    if devices > 1:
        return replace(xla, description=f"{xla.description}: oDriver's CPU kernels are for one device")
    try:
        _compile_at_once()
        linear.panel_width()
        width = cpu_attention.vector_width()
    except UnknownInstructions as error:
        raise ConfigurationError(str(error)) from None
    except KernelsUnavailable as unavailable:
        return replace(xla, description=f"{xla.description}: {unavailable}")
    misfit = _cpu_misfit(page_size, head_dim, kv_dtype, width)
    if attention_backend == "xla":
        misfit = "as was asked for"
    if misfit:
        return replace(xla, packs=True, description=f"oDriver's CPU kernels, attention by XLA: {misfit}")
    return Backend(CPUAttention(), cpu_attention.allocate, packs=True, description="oDriver's CPU kernels")


def _cpu_misfit(page_size: int, head_dim: int, kv_dtype: np.dtype, width: int) -> str | None:
    """Why the CPU's attention kernel cannot read such pages."""
    if page_size % width or head_dim % width:
        return f"page_size {page_size} or head_dim {head_dim} is no multiple of {width}"
    return None if kv_dtype.name in cpu_attention.DTYPES else f"it has none for pages of {kv_dtype}"
