"""The backend of this machine's device: XLA's operations, or our kernels where there are any."""

import logging
from dataclasses import replace

import jax
import numpy as np

from caching.attention import cpu_attention
from caching.attention.cpu_attention import CPUAttention
from caching.attention.spec import Kernel
from caching.attention.xla_attention import DECODE_BLOCK_TOKENS, GPU_DECODE_BLOCK_TOKENS, XLAAttention
from caching.attention.xla_latents import XLALatentAttention
from caching.cpu_kernels import KernelsUnavailable
from caching.instruction_set import UnknownInstructions
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu.tpu_chip import CHIPS, Chip
from caching.tpu.tpu_kernels import JAX, LATENTS, PALLAS, TPUKernel, by_bytes, of_xla
from engine.cpu_libraries import finish_loading
from engine.errors import ConfigurationError
from engine.models.cpu import rows as cpu_rows
from engine.models.cpu.rows import CPU_ROWS
from engine.models.weights import panels
from engine.models.weights.weight_format import Layout
from engine.sampling import cpu_sampler
from engine.speculation import cpu_verification
from engine.step.backend import Backend
from engine.step.cpu import unpack as cpu_unpack

logger = logging.getLogger(__name__)

SMALLEST_ACCELERATOR_STEP = 16
"""Rows of bfloat16 in a TPU's register. Multiplying them takes less time than reading weights."""
PAGE_SIZE = 16
TPU_PAGE_SIZE = 128
"""On a TPU a page is one DMA of the attention kernel, which should be large."""


def xla_backend(kv_dtype: np.dtype, *, latents: bool = False) -> Backend:
    """XLA's operations over pages of a dtype, on any device; of ``latents``, if there are such."""
    platform = jax.default_backend()
    block = GPU_DECODE_BLOCK_TOKENS if platform == "gpu" else DECODE_BLOCK_TOKENS
    attention: Kernel = XLALatentAttention(platform == "cpu") if latents else XLAAttention(kv_dtype, block)
    return Backend(attention, PagedAttentionCache.allocate, description="XLA's operations")


def default_page_size() -> int:
    """Tokens in a page, unless the operator sets them."""
    return TPU_PAGE_SIZE if jax.default_backend() == "tpu" else PAGE_SIZE


def tpu_backend(chip: Chip, kernel: TPUKernel) -> Backend:
    """An attention kernel for one kind of chip; XLA for the rest."""
    return Backend(
        kernel.attention(chip),
        kernel.allocate,
        description=f"XLA's operations, attention by {kernel.description}",
        layout=Layout.MATRIX,
        scans=True,
        smallest_step=SMALLEST_ACCELERATOR_STEP,
        stored_heads=kernel.stored_heads,
        most_pages_per_seq=kernel.most_pages_per_seq,
    )


def cpu_backend() -> Backend:
    """Our kernels, compiled if needed. Raises UnknownInstructions and KernelsUnavailable."""
    finish_loading()
    panels.panel_width()
    cpu_sampler.prepare()
    cpu_unpack.prepare()
    cpu_verification.prepare()
    cpu_rows.prepare()
    return Backend(
        CPUAttention(), cpu_attention.allocate, description="oDriver's CPU kernels", layout=Layout.PANELS,
        skips_padding=True, unpack=cpu_unpack.unpack, sampling=cpu_sampler.CPU_SAMPLING,
        verify=cpu_verification.verify, rows=CPU_ROWS,
    )  # fmt: skip


def tpu_kernel(
    chip: Chip,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: np.dtype,
    asked: str = "auto",
    *,
    extras: str | None = None,
    latents: bool = False,
) -> TPUKernel:
    """The requested kernel; "auto" is the one that reads these pages with the fewest bytes moved.

    ``extras`` are the model's ``attention_extras``, and ``latents`` whether its pages have such.
    Raises ConfigurationError if there is none.
    """
    if latents and asked in ("auto", LATENTS.name):
        return LATENTS
    if latents:
        raise ConfigurationError(f"attention_backend {asked} cannot read the latents of this model: choose auto or xla")
    if asked == "xla":
        return of_xla(kv_dtype)
    found = [
        kernel for kernel in by_bytes(chip, kv_heads, head_dim, page_size, kv_dtype) if asked in ("auto", kernel.name)
    ]
    misfits = [kernel.misfit(page_size, kv_dtype, extras) for kernel in found]
    for kernel, misfit in zip(found, misfits, strict=True):
        if misfit is None:
            return kernel
    raise ConfigurationError(f"attention_backend {asked} cannot serve this model on a TPU: {misfits[0]}")


def choose_backend(
    page_size: int,
    head_dim: int,
    kv_dtype: np.dtype,
    devices: int = 1,
    kv_heads: int = 1,
    attention_backend: str = "auto",
    extras: str | None = None,
    *,
    latents: bool = False,
) -> Backend:
    """The fastest backend for such pages on so many devices; compiles kernels if needed.

    ``kv_heads`` are those of one device, ``attention_backend`` is the operator's setting,
    ``extras`` are the model's ``attention_extras``, ``latents`` whether its pages have such. Raises
    ConfigurationError if no backend fits.
    """
    platform, xla = jax.default_backend(), xla_backend(kv_dtype, latents=latents)
    kind = jax.devices()[0].device_kind
    if platform == "tpu" and kind in CHIPS:
        chip, sizes = CHIPS[kind], (page_size, kv_heads, head_dim, kv_dtype, attention_backend)
        return tpu_backend(chip, tpu_kernel(chip, *sizes, extras=extras, latents=latents))
    if platform == "tpu" and attention_backend != "xla":
        xla = replace(xla, description=f"{xla.description}: the attention kernels are not set up for {kind}")
    if attention_backend in (PALLAS.name, JAX.name):
        raise ConfigurationError(
            f"attention_backend {attention_backend} is for {', '.join(CHIPS)}, not for {kind}: choose auto or xla"
        )
    if platform != "cpu":  # on a GPU a scan would copy each layer's weights, and wait for the host
        return replace(xla, scans=platform == "tpu", smallest_step=SMALLEST_ACCELERATOR_STEP)
    if devices > 1:
        return replace(xla, description=f"{xla.description}: oDriver's CPU kernels are for one device")
    try:
        ours, width = cpu_backend(), cpu_attention.vector_width()
    except UnknownInstructions as error:
        raise ConfigurationError(str(error)) from None
    except KernelsUnavailable as unavailable:
        logger.warning("XLA's operations serve, at half the speed, and a first start takes minutes: %s", unavailable)
        return replace(xla, description=f"{xla.description}: {unavailable}")
    misfit: str | None = "as was asked for"
    if attention_backend != "xla":
        misfit = _cpu_misfit(page_size, head_dim, kv_dtype, width, latents=latents)
    if misfit:
        return ours.with_attention_of(xla, f"{ours.description}, attention by XLA: {misfit}")
    return ours


def _cpu_misfit(page_size: int, head_dim: int, kv_dtype: np.dtype, width: int, *, latents: bool) -> str | None:
    """The reason why the CPU's attention kernel cannot read such pages, if there is one."""
    if latents:
        return "it has none for latents"
    if page_size % width or head_dim % width:
        return f"page_size {page_size} or head_dim {head_dim} is no multiple of {width}"
    return None if kv_dtype.name in cpu_attention.DTYPES else f"it has none for pages of {kv_dtype}"
