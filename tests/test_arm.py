"""The CPU's kernels as an ARM processor runs them, by an emulator: the same results as on this one, from the same sources.

It needs g++-aarch64-linux-gnu and qemu-user; elsewhere it is skipped.
"""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from caching.cpu_kernels import ATTENTION, compile_library, compiler, xla_headers
from engine.cpu_libraries import ADAPTERS, DRAW, LATER, LINEAR, ROWS, SOURCES

pytestmark = pytest.mark.thorough

CROSS, SYSTEM = "aarch64-linux-gnu-g++", "/usr/aarch64-linux-gnu"
EMULATOR = "qemu-aarch64"
LEVEL, WIDTH = "baseline", 4
"""Floats of a vector: on x86-64 and on ARM the same, so that arrays lie in the same way."""
PANEL = 2 * WIDTH
DTYPES = {"int8": 2, "int32": 4, "uint8": 6, "uint16": 7, "uint32": 8, "float32": 11, "bfloat16": 16}
"""XLA_FFI_DataType."""
Results = list[NDArray[Any]]
Call = Callable[..., tuple[Results, Results]]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Calls a handler on both processors."""
    if not (shutil.which(CROSS) and shutil.which(EMULATOR)):
        pytest.skip(f"no {CROSS} or no {EMULATOR}")
    machines: dict[str, list[str]] = {compiler(): [], CROSS: [EMULATOR, "-L", SYSTEM]}
    directories = {by: tmp_path_factory.mktemp(Path(by).name) for by in machines}
    libraries = {}
    with ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as here:
        for by, directory in directories.items():
            here.setenv("CXX", by)
            for source in (*SOURCES, *LATER):
                libraries[by, source] = pool.submit(compile_library, source, LEVEL, directory)
            caller = [by, "-std=c++17", "-w", f"-I{xla_headers()}", str(Path(__file__).parent / "one_call.cc")]
            subprocess.run([*caller, "-o", str(directory / "one_call"), "-ldl"], check=True)
            for source in (*SOURCES, *LATER):
                libraries[by, source].result()  # of CXX as it is now

    def on_both(source: Path, handler: str, arguments: Results, results: list[Any], **attributes: Any) -> Any:
        written = written_call(arguments, results, attributes)
        return tuple(
            read_results(
                subprocess.run(
                    [*prefix, str(directories[by] / "one_call"), str(libraries[by, source].result()), handler],
                    input=written, stdout=subprocess.PIPE, check=True,
                ).stdout,
                results,
            )
            for by, prefix in machines.items()
        )  # fmt: skip

    return on_both


def written_call(arguments: Results, results: list[Any], attributes: dict[str, Any]) -> bytes:
    """What one_call.cc reads. A result is an index of the argument whose memory it has, or (shape, dtype)."""

    def integers(*values: int) -> bytes:
        return np.array(values, np.int64).tobytes()

    def header(x: NDArray[Any]) -> bytes:
        return integers(DTYPES[str(x.dtype)], x.nbytes, x.ndim, *x.shape)

    parts = [integers(len(arguments))]
    parts += chain.from_iterable((header(x), x.tobytes()) for x in arguments)
    parts.append(integers(len(results)))
    for result in results:
        is_shared = isinstance(result, int)
        parts += header(arguments[result] if is_shared else np.empty(*result)), integers(result if is_shared else -1)
    parts.append(integers(len(attributes)))
    for name, value in attributes.items():
        parts += name.encode().ljust(16, b"\0"), value.tobytes().ljust(8, b"\0")
    return b"".join(parts)


def read_results(content: bytes, results: list[Any]) -> Results:
    """Those that are not the memory of an argument, and the bytes of those that are."""
    found = []
    for result in reversed(results):
        if isinstance(result, int):
            found.append(np.frombuffer(content, np.uint8))
        else:
            like = np.empty(*result)
            content, own = content[: -like.nbytes], content[-like.nbytes :]
            found.append(np.frombuffer(own, like.dtype).reshape(like.shape))
    return found[::-1]


def random(*shape: int) -> NDArray[np.float32]:
    """Numbers about 1, the same for the same shape."""
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def build_kernels(form: str, lead: tuple[int, ...], depth: int, width: int) -> Results:
    """Random panels and scales of a form."""
    shape, rng = (*lead, -(-width // PANEL), depth, PANEL), np.random.default_rng(0)
    if form in ("float32", "bfloat16"):
        return [random(*shape).astype(jnp.dtype(form)), np.zeros(0, np.float32)]
    if form == "int8":
        return [rng.integers(-127, 128, shape, np.int8), rng.uniform(0.01, 0.02, (*lead, width)).astype(np.float32)]
    halves, scales = (*shape[:-1], PANEL // 2), (*shape[:-2], -(-depth // 32), PANEL)
    return [rng.integers(0, 256, halves, np.uint8), rng.uniform(0.1, 0.2, scales).astype(np.float32)]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_products(call: Call, form: str) -> None:
    """Of one row, few and many, with whole panels and a part of one; and by the kernels of several experts."""
    for rows in (1, 5, 40):
        x, (panels, scales) = random(rows, 100), build_kernels(form, (), 100, 43)
        (here,), (arm,) = call(LINEAR, "odriver_linear", [x, panels, scales], [((rows, 43), np.float32)])
        assert np.abs(here).max() > 1
        np.testing.assert_allclose(arm, here, rtol=1e-4, atol=1e-4)
    sizes, (panels, scales) = np.array([3, 0, 30, 1], np.int32), build_kernels(form, (4,), 100, 43)
    arguments = [random(36, 100), panels, scales, sizes]
    (here,), (arm,) = call(LINEAR, "odriver_grouped_linear", arguments, [((36, 43), np.float32)])
    np.testing.assert_allclose(arm, here, rtol=1e-4, atol=1e-4)
    assert not arm[34:].any()


def test_rows(call: Call) -> None:
    """What is between products, over rows that fill no whole vectors."""
    result = ((5, 43), np.float32)
    calls: list[tuple[str, Results, dict[str, Any]]] = [
        ("odriver_norm", [random(5, 43), random(43)], {"eps": np.float32(1e-5), "centered": np.int64(centered)})
        for centered in (0, 1)
    ]
    calls += [(name, [3 * random(5, 2, 43)], {}) for name in ("odriver_gated_silu", "odriver_gated_gelu_tanh")]
    calls.append(("odriver_added", [random(5, 43), 2 * random(5, 43)], {"scale": np.float32(0.3)}))
    for name, arguments, attributes in calls:
        (here,), (arm,) = call(ROWS, name, arguments, [result], **attributes)
        assert np.abs(here).max() > 1
        np.testing.assert_allclose(arm, here, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize(("window", "soft_cap", "with_sinks"), [(0, 0, False), (40, 5, True)])
def test_attention(call: Call, dtype: str, window: int, soft_cap: float, with_sinks: bool) -> None:
    """A decoding row, and a prompt's chunk after pages that are there, with rotation; the pages are written alike."""
    page_size, kv_heads, head_dim, heads, lens = 16, 2, 24, 6, np.array([200, 77], np.int32)
    pages = random(22, kv_heads, 2, page_size, head_dim)
    if dtype == "uint16":
        pages = pages.astype(jnp.bfloat16).view(np.uint16)
    q, k, v = random(31, heads, head_dim), random(31, kv_heads, head_dim), random(31, kv_heads, head_dim)[::-1].copy()
    angles = random(31, 1, head_dim // 2)
    sinks = random(heads) if with_sinks else np.zeros(0, np.float32)
    tables = np.random.default_rng(1).permutation(21)[:20].astype(np.int32) + 1
    table = np.stack([np.resize(tables[:13], 13), np.resize(tables[13:], 13)])
    last, num_seqs = np.array([0, 1, 30, 30], np.int32)[:3], np.array([2], np.int32)

    arguments = [pages, q, k, v, np.cos(angles), np.sin(angles), sinks, lens, table, last, num_seqs]
    here, arm = call(
        ATTENTION, "odriver_attention", arguments, [0, (q.shape, np.float32)], scale=np.float32(head_dim**-0.5),
        window=np.int64(window), chunk=np.int64(0), first=np.int64(0), soft_cap=np.float32(soft_cap),
    )  # fmt: skip

    np.testing.assert_allclose(arm[1], here[1], rtol=1e-4, atol=1e-4)
    assert np.abs(here[1][:30]).max() > 0.1 and not arm[1][30:].any()
    stored = [found[0].view(dtype).astype(np.float64) for found in (here, arm)]
    changed = stored[0] != pages.reshape(-1)
    assert 0 < changed.sum() <= 30 * 2 * kv_heads * head_dim
    if dtype == "float32":
        np.testing.assert_allclose(*stored, rtol=1e-5, atol=1e-5)
    else:
        assert np.abs(stored[0] - stored[1]).max() <= 1  # the last digit of bfloat16


def test_draws(call: Call) -> None:
    """Greedy rows and drawn ones, with each way to cut: the same tokens; and none where a logit is no number."""
    rows, vocabulary = 64, 1000
    rng = np.random.default_rng(0)
    logits = 3 * random(rows, vocabulary)
    logits[7, 3] = np.nan
    parameters: Results = [
        rng.choice([0, 0.5, 1], rows).astype(np.float32),
        rng.choice([0, 1, 40], rows).astype(np.int32),
        rng.choice([0.3, 0.9, 1], rows).astype(np.float32),
        rng.choice([0, 0.1], rows).astype(np.float32),
        np.arange(rows, dtype=np.uint32),
        np.arange(rows, dtype=np.int32),
        np.array([1, 2], np.uint32),
    ]

    (here,), (arm,) = call(DRAW, "odriver_sample", [logits, *parameters], [((rows,), np.int32)])

    np.testing.assert_array_equal(arm, here)
    assert here[7] == -1 and len(set(here)) > rows // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters(call: Call, dtype: str) -> None:
    """Rows with either of two adapters, and without one."""
    rows, depth, runs = 19, 30, np.array([11, 5], np.int32)
    width, ranks = 2 * int(runs.sum()), [3, 6]
    panels = [-(-sum(ranks) // WIDTH) * WIDTH * depth // PANEL] + [
        -(-2 * run // PANEL) * rank for run, rank in zip(runs, ranks, strict=True)
    ]
    factors = [random(sum(panels), PANEL, slot + 1)[..., slot].astype(jnp.dtype(dtype)) for slot in range(2)]
    header = np.zeros(16, np.int32)
    header[:3] = factors[0].itemsize, *ranks
    words = np.stack([np.concatenate([header, each.reshape(-1).view(np.int32)]) for each in factors])
    slots = np.random.default_rng(0).integers(-1, 2, rows).astype(np.int32)
    products = random(rows, width)

    arguments = [products, random(rows, depth), slots, words, runs]
    (here,), (arm,) = (
        [found[0].view(np.float32).reshape(rows, width)]
        for found in call(ADAPTERS, "odriver_add_adapters", arguments, [0])
    )

    np.testing.assert_allclose(arm, here, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal((here != products).any(axis=1), slots >= 0)
