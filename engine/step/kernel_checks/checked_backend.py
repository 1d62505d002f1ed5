"""Whether this machine's kernels compute what they should; those that do not are left to XLA."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np

from caching.attention.spec import AttentionKernel, AttentionSpec
from caching.attention.twin import Heads, largest_error
from caching.metadata import PagedAttentionCacheMetaData
from engine.hosts.agreement import least_of_all
from engine.models.layers.row_operations import XLA_ROWS
from engine.models.layers.self_attention import SelfAttentionSpec, self_attention
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.models.weights.weight_format import Layout
from engine.sampling.operations import XLA_SAMPLING
from engine.step.backend import Backend
from engine.step.backend_choice import xla_backend
from engine.step.kernel_checks.product_faults import experts_fault, product_fault
from engine.step.kernel_checks.row_faults import rows_fault
from engine.step.kernel_checks.sampling_faults import sampling_fault
from engine.step.kernel_checks.tolerance import tolerance_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """An attention kernel and what a model asks of it."""

    backend: Backend
    one_page: PagedAttentionCacheMetaData
    specs: tuple[AttentionSpec, ...]
    """Of self-attention; the other layers' attention is XLA's."""
    heads: Heads

    def fault(self) -> str | None:
        """How the kernel differs from its twin; None if it does not."""
        tolerance = tolerance_of(self.one_page.dtype, self.heads.dtype)
        for spec in self.specs:
            attention = cast(AttentionKernel, self.backend.attention)
            error = largest_error(attention, self.backend.allocate, self.one_page, spec, self.heads)
            if not error <= tolerance:
                return f"its results differ from plain attention's by {error:.3g}, more than {tolerance:g}"
        return None


def trial_of(
    backend: Backend,
    partition: Partition,
    page_size: int,
    dtype: np.dtype,
    kv_dtype: np.dtype,
    reader: ModelSpec | None,
) -> Trial:
    """What a device's part of a model asks of a backend's kernel, and a ``reader`` of its pages."""
    model = partition.model
    mixers = [mixer for mixer in model.mixers if isinstance(mixer, SelfAttentionSpec)]
    num_heads = max((mixer.num_heads for mixer in mixers), default=0)
    sinks = any(mixer.sinks for mixer in mixers)
    heads = Heads(num_heads // partition.devices, partition.kv_heads_each, model.head_dim, dtype, sinks)
    reading = [] if reader is None else [self_attention(block) for block in reader.blocks]
    specs = tuple(dict.fromkeys(mixer.scores for mixer in (*mixers, *reading)))
    return Trial(backend, backend.one_page(partition, page_size, kv_dtype), specs, heads)


@cache
def checked(trial: Trial, kv_dtype: np.dtype, *, int4_experts: bool = False) -> Backend:
    """The backend, with XLA's operations in the place of kernels that differ from their twins, or
    fail. On several hosts every process must call this, and a fault of one holds for all.

    ``int4_experts`` are to be served, if the backend can: it may be that they get 8 bits.
    """
    backend, xla = trial.backend, xla_backend(kv_dtype)
    if trial.specs and backend.attention != xla.attention and (why := _fault("attention", trial.fault)):
        words = f"{xla.description}, in the place of {backend.description}: {why}"
        backend = replace(backend.with_attention_of(xla, words), replaced=("attention",))
    if backend.layout is Layout.PANELS and (why := _fault("matrix product", product_fault)):
        words = f"matrix products by XLA: {why}"
        backend = _without(backend, "matrix product", words, layout=xla.layout, skips_padding=False)
    if backend.rows != XLA_ROWS and (why := _fault("norm", rows_fault)):
        backend = _without(backend, "norm", f"norms, gates and additions by XLA: {why}", rows=XLA_ROWS)
    if backend.sampling != XLA_SAMPLING and (why := _fault("sampling", sampling_fault)):
        words = f"what is between logits and tokens by XLA: {why}"
        backend = _without(backend, "sampling", words, sampling=XLA_SAMPLING)
    if int4_experts and backend.layout is Layout.MATRIX and (why := _fault("int4 experts", experts_fault)):
        backend = _without(backend, "int4 experts", f"experts in 8 bits: {why}", least_expert_bits=8)
    return backend


def _without(backend: Backend, kernel: str, words: str, **instead: Any) -> Backend:
    """The backend with these fields, as a kernel of it is replaced, and with the words in its description."""
    replaced = (*backend.replaced, kernel)
    return replace(backend, description=f"{backend.description}; {words}", replaced=replaced, **instead)


def _fault(name: str, fault: Callable[[], str | None]) -> str | None:
    """The fault of a kernel on any host, which is logged."""
    try:
        why = fault()
    except Exception as error:  # a kernel that cannot be compiled here is no reason not to serve
        logger.debug("the %s kernel fails", name, exc_info=True)
        why = f"it fails ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if least_of_all(int(why is None)):
        return None
    why = why or "it is at fault on another host"
    logger.error(
        "THE %s KERNEL IS REPLACED by XLA's operations, which are slower: %s. Please report this, with what "
        "`odriver doctor --tpu` says",
        name.upper(), why,
    )  # fmt: skip
    return why
