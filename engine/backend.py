"""Which operations serve on this machine's device: XLA's own, or kernels of ours where we have them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from caching import attention, cpu_attention, tpu_attention
from caching.attention import PageTable
from caching.cpu_kernels import KernelsUnavailable, load
from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import is_scaled, stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu_chip import CHIPS, Chip
from engine.errors import ConfigurationError
from engine.mesh import TP, DeviceMesh
from engine.models import linear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.rope import rotate

CACHE = PartitionSpec(TP)
"""Each device has pages of its own, for its own kv heads: one behind the other, as if there were as many more."""


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


def _as_they_are(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    del dtype
    return kv_heads, head_dim


@dataclass(frozen=True)
class Backend:
    """What a step is made of."""

    attention: RotaryAttention
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
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]] = _as_they_are
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


class Attention(Protocol):
    """RotaryAttention for q and k that have been turned."""

    def __call__(
        self,
        kv_pages: Array,
        q: Array,
        k: Array,
        v: Array,
        table: PageTable,
        *,
        sm_scale: float,
        sliding_window: int | None,
    ) -> tuple[Array, Array]:
        """Write k and v, attend."""


@dataclass(frozen=True)
class RotatedByXLA:
    """Rotary embedding by XLA before an attention that does not turn."""

    attend: Attention

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
        """See RotaryAttention."""
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.attend(kv_pages, q, k, v, table, sm_scale=sm_scale, sliding_window=sliding_window)


@dataclass(frozen=True)
class XLAAttention:
    """Attention by XLA's operations over pages of a dtype."""

    kv_dtype: np.dtype

    def __call__(
        self,
        kv_pages: Array,
        q: Array,
        k: Array,
        v: Array,
        table: PageTable,
        *,
        sm_scale: float,
        sliding_window: int | None,
    ) -> tuple[Array, Array]:
        """See Attention."""
        return attention.paged_attention(
            kv_pages, q, k, v, table, sm_scale=sm_scale, sliding_window=sliding_window, kv_dtype=self.kv_dtype
        )


def _with_scales(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    return kv_heads, stored_head_dim(head_dim, dtype)


def xla_backend(kv_dtype: np.dtype) -> Backend:
    """XLA's operations, which serve on any device."""
    return Backend(
        RotatedByXLA(XLAAttention(kv_dtype)),
        PagedAttentionCache.allocate,
        packs=False,
        description="XLA's operations",
        stored_heads=_with_scales,
    )


SMALLEST_ACCELERATOR_STEP = 16
"""Rows of bfloat16 that a TPU's register holds; multiplying so many takes less than reading what they are multiplied by."""

PAGE_SIZE = 16
TPU_PAGE_SIZE = 128
"""There a page is one transfer of the attention kernel, which should not be small."""


def default_page_size() -> int:
    """Tokens in a page, where the operator does not say."""
    return TPU_PAGE_SIZE if jax.default_backend() == "tpu" else PAGE_SIZE


def tpu_backend(chip: Chip) -> Backend:
    """jax's attention kernel, for one kind of chip."""
    return Backend(
        RotatedByXLA(tpu_attention.TPUAttention(chip)),
        tpu_attention.allocate,
        packs=False,
        description="XLA's operations, attention by jax's TPU kernel",
        flattens=True,
        scans=True,
        smallest_step=SMALLEST_ACCELERATOR_STEP,
        stored_heads=tpu_attention.stored_heads,
        holds_table=tpu_attention.holds_table,
    )


def _compile_at_once() -> None:
    """The kernels' libraries, each on a core of its own."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, (linear.SOURCE, cpu_attention.SOURCE)))


def choose_backend(page_size: int, head_dim: int, kv_dtype: np.dtype, devices: int = 1) -> Backend:
    """The fastest that can serve such pages here, on so many devices; compiles kernels if that has not been done.

    Raises ConfigurationError where none can.
    """
    xla = xla_backend(kv_dtype)
    if jax.default_backend() == "tpu":
        return _choose_for_tpu(jax.devices()[0].device_kind, xla, kv_dtype)
    if jax.default_backend() != "cpu":
        return _accelerated(xla)
    if devices > 1:
        return replace(xla, description=f"{xla.description}: oDriver's CPU kernels are for one device")
    try:
        _compile_at_once()
        linear.panel_width()
        width = cpu_attention.vector_width()
    except KernelsUnavailable as unavailable:
        return replace(xla, description=f"{xla.description}: {unavailable}")
    misfit = None
    if page_size % width or head_dim % width:
        misfit = f"page_size {page_size} or head_dim {head_dim} is no multiple of {width}"
    elif kv_dtype.name not in cpu_attention.DTYPES:
        misfit = f"it has none for pages of {kv_dtype}"
    if misfit:
        return replace(xla, packs=True, description=f"oDriver's CPU kernels, attention by XLA: {misfit}")
    return Backend(
        cpu_attention.paged_attention, cpu_attention.allocate, packs=True, description="oDriver's CPU kernels"
    )


def _accelerated(backend: Backend) -> Backend:
    return replace(backend, scans=True, smallest_step=SMALLEST_ACCELERATOR_STEP)


def _choose_for_tpu(kind: str, xla: Backend, kv_dtype: np.dtype) -> Backend:
    if kind in CHIPS:
        check_tpu_pages(kv_dtype)
        return tpu_backend(CHIPS[kind])
    return replace(_accelerated(xla), description=f"{xla.description}: the attention kernel is not set up for {kind}")


def check_tpu_pages(kv_dtype: np.dtype) -> None:
    """Raises ConfigurationError where jax's kernel cannot read such pages: it has one scale for all of them."""
    if is_scaled(kv_dtype):
        raise ConfigurationError(
            f"kv_cache_dtype {kv_dtype} has a scale for each token, which the TPU's attention kernel cannot read: "
            "choose fp8, which takes as much memory"
        )
