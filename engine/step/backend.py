"""What a backend is: the operations of a step on a kind of device, and the pages that these read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from caching.attention.spec import Kernel
from caching.metadata import PagedAttentionCacheMetaData, PageTail
from caching.page_dtype import stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache, allocate_states, allocate_tail
from caching.state.spec import StatePool
from engine.devices.mesh import TP, DeviceMesh
from engine.models.layers.cache_layout import CacheLayout, cache_layout
from engine.models.layers.row_operations import XLA_ROWS, RowOperations
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.models.weights import panels
from engine.models.weights.store import int8_products
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.sampling.operations import XLA_SAMPLING, SamplingOperations
from engine.speculation.speculative_config import SpeculativeConfig
from engine.speculation.verification import Verify, verify
from engine.step.inputs.layout import StepLayout, Unpack

CACHE = PartitionSpec(TP)
"""Sharding of the pool: each device has the pages of its own kv heads, concatenated on axis 0."""


def _with_scales(kv_heads: int, head_dim: int, dtype: np.dtype) -> tuple[int, int]:
    return kv_heads, stored_head_dim(head_dim, dtype)


@dataclass(frozen=True)
class Backend:
    """The operations of a step."""

    attention: Kernel
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache]
    description: str
    """For logs and status."""
    layout: Layout = Layout.AXES
    """The layout in which its matrix products read weights."""
    scans: bool = False
    """Whether repeated layers run by ``lax.scan``. On CPUs and GPUs XLA would copy their weights first."""
    smallest_step: int = 1
    """Tokens below which a step is no faster: it is bound by reading the weights."""
    skips_padding: bool = False
    """Whether padding costs next to nothing, as products and attention leave it out. XLA's do not,
    nor do recurrent layers."""
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]] = _with_scales
    """The kv_heads and head_dim of pages, from those of the model and the dtype."""
    most_pages_per_seq: int | None = None
    """The longest page table of a sequence that attention has room for; None is any."""
    least_expert_bits: int = 4
    """See WeightFormat."""
    unpack: Unpack = StepLayout.unpack
    """Takes apart what a step is told."""
    sampling: SamplingOperations = XLA_SAMPLING
    """What is between logits and tokens."""
    rows: RowOperations = XLA_ROWS
    """What is between a decoder's products."""
    verify: Verify = verify
    """Which of these are the text, where rows have drafts."""
    replaced: tuple[str, ...] = ()
    """Kernels that are at fault on this machine, in whose place XLA's operations serve."""
    draft: "Backend | None" = None
    """That of the draft model, if there is one."""

    def with_attention_of(self, xla: "Backend", description: str) -> "Backend":
        """This one with XLA's attention, and its pages, in the place of a kernel."""
        layout = self.layout if self.layout is Layout.PANELS else xla.layout
        return replace(
            xla, description=description, layout=layout, scans=self.scans, smallest_step=self.smallest_step,
            unpack=self.unpack, sampling=self.sampling, rows=self.rows, verify=self.verify,
        )  # fmt: skip

    def in_words(self, *, quantized: bool) -> str:
        """What serves; for quantised weights, whether the CPU's products of these are by VNNI."""
        by_vnni = quantized and self.layout is Layout.PANELS and panels.inputs_together(8) > 1
        return f"{self.description}, weights by VNNI" if by_vnni else self.description

    def weight_format(self, dtype: np.dtype, activations: np.dtype | None = None, bits: int = 8) -> WeightFormat:
        """The format of a dtype's weights; quantised if ``activations``, the compute dtype, is set."""
        return WeightFormat(dtype, self.layout, self.scans, activations, bits, self.least_expert_bits)

    def quantized_format(
        self, dtype: np.dtype, activations: np.dtype, quantization: str | None, partition: Partition
    ) -> WeightFormat:
        """The format of ``quantization``, int8, w8a8, int4 or None, for a model."""
        form = self.weight_format(dtype, activations if quantization else None, 4 if quantization == "int4" else 8)
        return replace(form, int8_products=int8_products(partition)) if quantization == "w8a8" else form

    def one_page(
        self,
        partition: Partition,
        page_size: int,
        dtype: np.dtype,
        activations: np.dtype | None = None,
        speculation: SpeculativeConfig | None = None,
    ) -> PagedAttentionCacheMetaData:
        """A device's pool of one page of a dtype, and of one slot, for its part of a model.

        ``activations`` are of the dtype of pages by default. With ``speculation`` a slot has room
        for the tokens of a row with drafts.
        """
        num_undone = 0 if speculation is None else 1 + speculation.num_speculative_tokens
        model = partition.model
        kv_heads, head_dim = self.stored_heads(partition.kv_heads_each, model.head_dim, dtype)
        layout = cache_layout(model.blocks, keeps_all=model.keeps_all)
        return PagedAttentionCacheMetaData(
            num_layers=layout.num_layers,
            num_pages=1,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            vectors=1 if model.has_latents else 2,
            stacked=self.scans,
            windows=layout.windows,
            states=self._one_slot(layout, partition.devices, activations or dtype, num_undone),
        )

    def _one_slot(self, layout: CacheLayout, devices: int, activations: np.dtype, num_undone: int) -> StatePool | None:
        if not layout.states:
            return None
        arrays, count = layout.states[0].slot(num_undone), len(layout.states)
        return StatePool.of_one_slot(arrays, count, devices, activations, stacked=self.scans)

    def _allocate(self, metadata: PagedAttentionCacheMetaData) -> PagedAttentionCache:
        draft: tuple[Array, ...] = ()
        if self.draft is not None and metadata.draft is not None:
            draft = self.draft.allocate(metadata.draft).layers + allocate_tail(metadata.draft)
        return replace(self.allocate(metadata), states=allocate_states(metadata.states), draft=draft)

    def allocator(self, metadata: PagedAttentionCacheMetaData, mesh: DeviceMesh) -> Callable[[], PagedAttentionCache]:
        """Allocates zeroed pages and slots on every device; raises JaxRuntimeError if out of
        memory."""
        return mesh.maker(mesh.on_each(partial(self._allocate, metadata), (), CACHE), CACHE)

    def abstract_cache(self, metadata: PagedAttentionCacheMetaData, mesh: DeviceMesh) -> PagedAttentionCache:
        """Shapes and dtypes of what ``allocator`` returns, to compile against."""
        cache: PagedAttentionCache = mesh.shapes(jax.eval_shape(self.allocator(metadata, mesh)), *CACHE)
        return cache


def with_draft(
    page: PagedAttentionCacheMetaData, of_draft: PagedAttentionCacheMetaData, draft: ModelSpec, num_drafts: int,
    activations: np.dtype,
) -> PagedAttentionCacheMetaData:  # fmt: skip
    """A page of a model with what it holds of a draft model, or of a draft head, in it.

    A head's page has the features of the tokens that were fed last, as many as a step feeds of a
    row with ``num_drafts``: behind some of them, or behind the page's last one, goes the next step.
    One that reads the model's pages sees a key more of a window than the model does, and none of its
    own: the model keeps two tokens more.
    """
    if draft.head is None:
        return replace(page, of_draft=of_draft)
    tail = PageTail(min(1 + num_drafts, page.page_size), draft.feature_size, activations)
    windows = tuple(window and window + 2 for window in page.windows) if draft.reads_pages else page.windows
    return replace(page, windows=windows, of_draft=replace(of_draft, tail=tail))
