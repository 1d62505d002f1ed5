"""Every attention kernel that this machine can run, against its twin, and the time it takes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from caching.attention import cpu_attention
from caching.attention.cpu_attention import CPUAttention
from caching.attention.spec import AttentionInputs, AttentionKernel, AttentionSpec, CacheView, PageTable
from caching.attention.twin import Heads, largest_error
from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.page_dtype import stored_head_dim
from caching.paged_attention_cache import PagedAttentionCache
from caching.tpu.pallas_attention import PallasAttention
from caching.tpu.tpu_chip import CHIPS, Chip
from caching.tpu.tpu_kernels import JAX, PALLAS, TPUKernel
from engine.hardware.measurement import Measurement, Scale, attempted
from engine.step.backend_choice import xla_backend
from engine.step.kernel_checks.product_faults import product_fault
from engine.step.kernel_checks.row_faults import rows_fault
from engine.step.kernel_checks.sampling_faults import sampling_fault
from engine.step.kernel_checks.tolerance import tolerance_of

BFLOAT16, FLOAT32, FP8 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(jnp.float8_e4m3fn)
CALLS = 20
"""Calls that are timed together."""


@dataclass(frozen=True)
class Candidate:
    """A kernel with the layout of its pages."""

    name: str
    kernel: Callable[[np.dtype], AttentionKernel]
    """For pages of a dtype. Raises what keeps it from running here."""
    allocate: Callable[[PagedAttentionCacheMetaData], PagedAttentionCache]
    stored_heads: Callable[[int, int, np.dtype], tuple[int, int]]
    interpreted: bool = False
    has_sinks: bool = True


@dataclass(frozen=True)
class Case:
    """Heads and scores as some models have them."""

    name: str
    heads: Heads
    spec: AttentionSpec
    kv_dtype: np.dtype
    page_size: int

    def pool(self, candidate: Candidate, num_pages: int) -> PagedAttentionCacheMetaData:
        """A layer's pool in a kernel's layout."""
        kv_heads, head_dim = candidate.stored_heads(self.heads.kv_heads, self.heads.head_dim, self.kv_dtype)
        return PagedAttentionCacheMetaData(
            num_layers=1, num_pages=num_pages, page_size=self.page_size, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=self.kv_dtype,
        )  # fmt: skip


ON_ACCELERATORS = (
    Case("32 heads, 8 kv heads of 128", Heads(32, 8, 128, BFLOAT16), AttentionSpec(128**-0.5), BFLOAT16, 128),
    Case("4 heads, 1 kv head of 128", Heads(4, 1, 128, BFLOAT16), AttentionSpec(128**-0.5), BFLOAT16, 128),
    Case("14 heads, 2 kv heads of 64", Heads(14, 2, 64, BFLOAT16), AttentionSpec(64**-0.5), BFLOAT16, 128),
    Case("windowed, capped, 256 wide", Heads(8, 4, 256, BFLOAT16), AttentionSpec(256**-0.5, 4096, 50.0), BFLOAT16, 128),
    Case("pages in fp8", Heads(32, 8, 128, BFLOAT16), AttentionSpec(128**-0.5), FP8, 128),
    Case("with sinks", Heads(64, 8, 64, BFLOAT16, sinks=True), AttentionSpec(64**-0.5, 128), BFLOAT16, 128),
)
ON_CPUS = (
    Case("4 heads, 2 kv heads of 16", Heads(4, 2, 16, FLOAT32), AttentionSpec(0.25), FLOAT32, 16),
    Case("windowed, capped, pages in bfloat16", Heads(4, 2, 16, FLOAT32), AttentionSpec(0.25, 8, 5.0), BFLOAT16, 16),
    Case("with sinks", Heads(4, 2, 16, FLOAT32, sinks=True), AttentionSpec(0.25), FLOAT32, 16),
)


def measure_kernels(scale: Scale, bandwidth: float) -> Iterator[Measurement]:
    """Errors of all kernels, and their times beside those of a ``bandwidth`` in bytes a second."""
    on_cpu = jax.default_backend() == "cpu"
    for candidate in _candidates():
        section = f"kernel {candidate.name}"
        for case in ON_CPUS if on_cpu else ON_ACCELERATORS:
            if case.heads.sinks and not candidate.has_sinks:
                yield Measurement(section=section, what=case.name, state="not measured", note="it has no sinks")
                continue
            yield from attempted(section, partial(_errors, section, candidate, case))
            if not (candidate.interpreted or case.heads.sinks):
                yield from attempted(section, partial(_times, section, candidate, case, scale, bandwidth))
    if on_cpu:
        yield from attempted("kernel matrix product", _products)
        yield Measurement(section="kernel jax", what="all", state="not measured", note="it runs on a TPU alone")


def _candidates() -> list[Candidate]:
    """The kernels that are for this machine; any machine has XLA's."""
    xla = Candidate(
        "xla", _xla_kernel, PagedAttentionCache.allocate, lambda kv, dim, dtype: (kv, stored_head_dim(dim, dtype))
    )
    if jax.default_backend() == "cpu":
        interpreted = PallasAttention(CHIPS["TPU v5 lite"], interpret=True)
        return [
            Candidate("cpu", _cpu_kernel, cpu_attention.allocate, xla.stored_heads),
            xla,
            Candidate(
                "pallas, interpreted", lambda _: interpreted, PALLAS.allocate, PALLAS.stored_heads, interpreted=True
            ),
        ]
    chip = CHIPS.get(jax.local_devices()[0].device_kind)
    return [xla] if chip is None else [_of_tpu(PALLAS, chip), _of_tpu(JAX, chip, has_sinks=False), xla]


def _of_tpu(kernel: TPUKernel, chip: Chip, *, has_sinks: bool = True) -> Candidate:
    attention = cast(AttentionKernel, kernel.attention(chip))
    return Candidate(kernel.name, lambda _: attention, kernel.allocate, kernel.stored_heads, has_sinks=has_sinks)


def _xla_kernel(kv_dtype: np.dtype) -> AttentionKernel:
    return cast(AttentionKernel, xla_backend(kv_dtype).attention)


def _cpu_kernel(kv_dtype: np.dtype) -> AttentionKernel:
    """Raises KernelsUnavailable."""
    del kv_dtype
    cpu_attention.vector_width()
    return CPUAttention()


def _errors(section: str, candidate: Candidate, case: Case) -> Iterator[Measurement]:
    begun = time.perf_counter()
    error = largest_error(
        candidate.kernel(case.kv_dtype), candidate.allocate, case.pool(candidate, 1), case.spec, case.heads
    )
    tolerance = tolerance_of(case.kv_dtype, case.heads.dtype)
    yield Measurement(
        section=section,
        what=f"error, {case.name}",
        value=error,
        expected=tolerance,
        state="good" if error <= tolerance else "bad",
        note=f"compiled and run in {time.perf_counter() - begun:.1f} s",
    )


def _times(section: str, candidate: Candidate, case: Case, scale: Scale, bandwidth: float) -> Iterator[Measurement]:
    """One layer of a decoding step, beside the time to read its keys and values."""
    heads = case.heads
    each = pages_for(scale.tokens, case.page_size)
    table = PageTable(
        jnp.full(scale.rows, scale.tokens, jnp.int32),
        1 + jnp.arange(scale.rows * each, dtype=jnp.int32).reshape(scale.rows, each),
        jnp.arange(scale.rows + 1, dtype=jnp.int32),
        jnp.full(1, scale.rows, jnp.int32),
    )
    q, k = (jnp.ones((scale.rows, count, heads.head_dim), heads.dtype) for count in (heads.heads, heads.kv_heads))
    kernel = candidate.kernel(case.kv_dtype)
    turned = jnp.ones((scale.rows, 1, heads.head_dim // 2), np.float32)
    inputs = AttentionInputs(q, k, k, (turned, turned) if kernel.fuses_rotation else None)
    step = jax.jit(lambda pages: kernel(case.spec, CacheView(pages, table), inputs), donate_argnums=0)
    pages, out = step(candidate.allocate(case.pool(candidate, 1 + scale.rows * each)).layers[0])
    jax.block_until_ready(out)
    begun = time.perf_counter()
    for _ in range(CALLS):
        pages, out = step(pages)
    jax.block_until_ready(out)
    taken = (time.perf_counter() - begun) / CALLS
    seen = min(scale.tokens, case.spec.reach or scale.tokens)
    read = 2 * scale.rows * seen * heads.kv_heads * heads.head_dim * case.kv_dtype.itemsize
    yield Measurement(
        section=section,
        what=f"{scale.rows} rows of {scale.tokens:,} tokens, {case.name}",
        value=1e6 * taken,
        unit="us",
        expected=1e6 * read / bandwidth,
        note="a layer, beside the time to read its keys and values",
    )


def _products() -> Iterator[Measurement]:
    """And what is between them. Raises KernelsUnavailable."""
    for name, what, find in (
        ("matrix product", "float32, bfloat16, 8 and 4 bits", product_fault),
        ("norm", "norms, gates and additions", rows_fault),
        ("sampling", "bias, penalties, masks, draws and log-probabilities", sampling_fault),
    ):
        fault = find()
        state = "bad" if fault else "good"
        yield Measurement(section=f"kernel {name}", what=what, state=state, note=fault or "")
