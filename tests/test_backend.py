"""Which operations serve: the CPU's kernels where they can be had and know the shape, XLA's otherwise, saying why."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_needed import kernels_needed

from caching import cpu_kernels
from caching.attention import cpu_attention
from caching.attention.xla_attention import GPU_DECODE_BLOCK_TOKENS, XLAAttention
from caching.tpu.tpu_chip import CHIPS
from engine.errors import ConfigurationError
from engine.models.weights import panels
from engine.models.weights.weight_format import Layout
from engine.step.backend_choice import choose_backend, tpu_backend, tpu_kernel, xla_backend

FLOAT32 = np.dtype(np.float32)
XLA = xla_backend(FLOAT32)


@pytest.fixture
def fresh():
    """No library has been loaded yet, neither before nor after."""
    caches = (cpu_kernels.loading, cpu_attention.vector_width, panels.panel_width)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_xla_serves_and_says_what_would_help(monkeypatch, tmp_path):
    """A machine without a C++ compiler, and without libraries, is served by XLA's operations, and the reason is told."""
    monkeypatch.setattr(cpu_kernels, "SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    backend = choose_backend(16, 64, FLOAT32)

    assert backend.attention == XLA.attention and backend.layout is Layout.AXES
    assert "no C++ compiler" in backend.description and "g++" in backend.description


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    """What the compiler says is passed on, and nothing half made is left to be loaded."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'out of paper' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_kernels, "SHIPPED", tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    backend = choose_backend(16, 64, FLOAT32)

    assert backend.attention == XLA.attention and "out of paper" in backend.description
    assert not [*(tmp_path / "cache" / "odriver" / "kernels").glob("*.so")]


def test_a_shape_the_kernel_does_not_know_is_left_to_xla():
    """Pages or heads that are no whole vectors are attended by XLA, while weights are packed all the same."""
    with kernels_needed():
        panels.panel_width()

    backend = choose_backend(4, 64, FLOAT32)

    assert backend.attention == XLA.attention and backend.layout is Layout.PANELS
    assert "page_size 4" in backend.description


@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_pages_the_kernel_does_not_know_are_left_to_xla(kv_dtype):
    """It is said which, and they are attended as what they hold."""
    with kernels_needed():
        panels.panel_width()

    backend = choose_backend(16, 64, np.dtype(kv_dtype))

    assert backend.attention == xla_backend(np.dtype(kv_dtype)).attention and backend.layout is Layout.PANELS
    assert f"pages of {np.dtype(kv_dtype)}" in backend.description


def test_other_devices_are_served_by_xla(monkeypatch):
    """The CPU's kernels are for CPUs. A GPU waits for the host in loops: there are fewer, and of fewer turns."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    attention = XLAAttention(FLOAT32, GPU_DECODE_BLOCK_TOKENS)
    assert choose_backend(16, 64, FLOAT32) == dataclasses.replace(XLA, attention=attention, smallest_step=16)


def test_a_tpu_serves_what_is_planned_for_it(monkeypatch):
    """XLA's attention, too, is that of the planner: `plan` says what a start takes."""
    (kind, chip), pages = next(iter(CHIPS.items())), np.dtype(np.int8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])

    chosen = choose_backend(128, 128, pages, attention_backend="xla")

    planned = tpu_backend(chip, tpu_kernel(chip, 128, 1, 128, pages, "xla"))
    assert chosen.attention == planned.attention == XLAAttention(pages)
    assert (chosen.description, chosen.most_pages_per_seq) == (planned.description, None)
    assert chosen.stored_heads(1, 128, pages) == XLA.stored_heads(1, 128, pages)


def test_what_the_operator_asks_for_serves_or_is_refused():
    """XLA attends where that is wanted, and a TPU's kernel on a CPU is refused by name."""
    assert choose_backend(16, 64, FLOAT32, attention_backend="xla").attention == XLA.attention
    with pytest.raises(ConfigurationError, match=r"attention_backend pallas is for .* not for cpu: choose auto or xla"):
        choose_backend(16, 64, FLOAT32, attention_backend="pallas")
