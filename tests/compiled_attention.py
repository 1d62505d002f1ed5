"""What the compiler makes of an attention kernel, for a chip that is not there; libtpu has to be."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from caching.attention.spec import AttentionInputs, AttentionSpec, CacheView, PageTable
from caching.metadata import PagedAttentionCacheMetaData
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import TPUKernel
from engine.devices.mesh import DeviceMesh
from engine.planner.topology import chips_of
from engine.step.compilation import lower


def assert_compiles_in_place(
    kernel: TPUKernel, topology: str, heads: int, kv_heads: int, head_dim: int, kv_dtype: DTypeLike = jnp.bfloat16
) -> None:
    """The pages are written in place, and scratch does not grow with them."""
    chip, dtype = chips_of(topology)[0], np.dtype(kv_dtype)
    stored, wide = kernel.stored_heads(kv_heads, head_dim, dtype)
    metadata = PagedAttentionCacheMetaData(
        num_layers=1, num_pages=512, page_size=128, num_kv_heads=stored, head_dim=wide, dtype=dtype
    )
    (pages,) = jax.eval_shape(lambda: kernel.allocate(metadata)).layers
    table = PageTable(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in ((64,), (64, 40), (65,), (1,))))
    q, k = (jax.ShapeDtypeStruct((64, count, head_dim), jnp.bfloat16) for count in (heads, kv_heads))

    def step(pages, q, k, v, table):
        attention = kernel.attention(CHIPS[chip.device_kind])
        return attention(AttentionSpec(0.1, 100, 30.0), CacheView(pages, table), AttentionInputs(q, k, v))

    compiled = lower(step, *DeviceMesh((chip,)).shapes((pages, q, k, k, table)), donate=0).compile()

    sizes = compiled.memory_analysis()
    assert sizes.alias_size_in_bytes == metadata.num_bytes
    assert sizes.temp_size_in_bytes < 2**20
    assert "copy(%pages" not in compiled.as_text()
