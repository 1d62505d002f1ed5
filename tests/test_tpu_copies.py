"""The copies between a device's pages or states and the host, compiled for TPUs that are not there."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from caching.tpu.tpu_chip import CHIPS
from engine.devices.mesh import DeviceMesh
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.planner.topology import chips_of
from engine.step.backend_choice import TPU_PAGE_SIZE, tpu_backend, tpu_kernel
from engine.step.compilation import compile_program
from engine.step.host_cache.host_budget import STATE_COPY_SIZES, STATES_STAGED, HostBudget
from engine.step.host_cache.page_copies import CopyPrograms, copied_kinds

CONFIGS = Path(__file__).parent / "configs"
PAGES, SLOTS = 300, 20


@pytest.mark.thorough
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("Qwen3-Next-80B-A3B", "v6e:2x4"),
        ("Qwen3.5-35B-A3B", "v5e:2x4"),
        ("Granite-4.0-H-Tiny", "v5e:2x4"),
        ("Nemotron-3-Nano-30B-A3B", "v6e:2x4"),
        ("DeepSeek-V2-Lite", "v5e:2x4"),
        ("Gemma-3-27B", "v6e:2x4"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_pages_and_states_are_copied_in_place_by_a_tpu(tmp_path, name, topology, kv_dtype, devices):
    """What comes from the host is written into the donated cache, and no scratch grows with the pool."""
    pytest.importorskip("libtpu")
    chips = chips_of(topology)[:devices]
    (tmp_path / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    model, mesh = read_model_config(tmp_path), DeviceMesh(tuple(chips))
    if model.has_latents and kv_dtype != "bfloat16":
        pytest.skip("latents have no such pages")
    partition, chip = split(model, devices), CHIPS[chips[0].device_kind]
    dtype, kv = np.dtype(jax.numpy.bfloat16), np.dtype(kv_dtype)
    heads = partition.kv_heads_each, model.head_dim
    kernel = tpu_kernel(chip, TPU_PAGE_SIZE, *heads, kv, extras=model.attention_extras, latents=model.has_latents)
    backend = tpu_backend(chip, kernel)
    pool = backend.one_page(partition, TPU_PAGE_SIZE, kv, dtype)
    of_states = None
    if pool.states is not None:
        pool = replace(pool, states=replace(pool.states, num_slots=SLOTS))
        of_states = HostBudget(4, STATES_STAGED, 1, STATE_COPY_SIZES)
    pool = replace(pool, num_pages=PAGES)
    cache = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(backend.abstract_cache(pool, mesh))
    )

    kinds = copied_kinds(pool, HostBudget(4, 4, 1, states=of_states))
    assert len(kinds) == 1 + (pool.states is not None)
    for copied in kinds:
        each = pool.bytes_per_slot if copied.of_states else pool.bytes_per_page
        programs = list(CopyPrograms(backend, pool, mesh, copied).all())
        assert {program.name for program in programs} == {copied.gather, copied.scatter}
        for program in programs:
            compiled = compile_program(program).compiled
            sizes = compiled.memory_analysis()
            assert sizes.temp_size_in_bytes <= 4 * program.size * each + 2**21, (program.name, program.size)
            assert "all-gather" not in compiled.as_text() and "all-reduce" not in compiled.as_text()
            if program.name == copied.scatter:
                assert sizes.alias_size_in_bytes >= cache
            else:
                assert sizes.output_size_in_bytes < 2 * program.size * each + 2**20
