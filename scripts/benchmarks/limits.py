"""What the machine can do at best: read memory, multiply matrices. A child measures it, in the same run as the rest."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from scripts.benchmarks.figures.figure import Figure, figure
from scripts.benchmarks.models import Size
from scripts.benchmarks.processes.child import answer_all, ask_once

GIGABYTE = 10**9
SQUARE = 2048
ROWS = (1, 8, 32, 512)


class Limits(msgspec.Struct):
    """The best of several tries of each; on the first device, which here is a CPU."""

    bandwidth: dict[str, list[float]]
    """Bytes a second that were read from 1 GB, by method, a value per try."""
    sgemm: list[float]
    """FLOP a second of a 2048-cubed product in float32."""
    matrices: dict[int, list[float]]
    """Seconds for all matrices of a decode step of the model, by rows: the step less attention and everything else."""

    @property
    def best_bandwidth(self) -> float:
        """Of the best method."""
        return max(max(tries) for tries in self.bandwidth.values())

    @property
    def best_sgemm(self) -> float:
        """Of the best try."""
        return max(self.sgemm)

    def decode_rate(self, size: Size, rows: int) -> float:
        """Tokens a second if a step took only as long as reading the weights, or as multiplying by them."""
        reading, multiplying = 4 * size.parameters / self.best_bandwidth, size.decode_flop(rows) / self.best_sgemm
        return rows / max(reading, multiplying)

    def prefill_rate(self, size: Size, tokens: int) -> float:
        """Tokens a second if a prompt took only as long as its FLOP, or as reading the weights."""
        return tokens / max(size.prefill_flop(tokens) / self.best_sgemm, 4 * size.parameters / self.best_bandwidth)


def measure_limits(size: Size, repeats: int = 5) -> Limits:
    """Measure, in a child: some seconds, and 2 GB of memory."""
    limits: Limits = ask_once("scripts.benchmarks.limits", [size, repeats], Limits)
    return limits


def limit_figures(limits: Limits, model: str, size: Size) -> list[Figure]:
    """The limits as figures of their own."""
    figures = [
        figure("limits", f"memory read, {method}", "GB/s", [rate / GIGABYTE for rate in rates])
        for method, rates in limits.bandwidth.items()
    ]
    figures.append(figure("limits", f"sgemm, {SQUARE}³", "GFLOP/s", [rate / GIGABYTE for rate in limits.sgemm]))
    for rows, tries in limits.matrices.items():
        gigaflop = size.decode_flop(rows) / GIGABYTE
        best = rows / limits.decode_rate(size, rows)
        name = f"matrices of {model}, {rows} row{'s' if rows > 1 else ''}"
        figures.append(
            figure("limits", name, "GFLOP/s", [gigaflop / seconds for seconds in tries], limit=gigaflop / best)
        )
    return figures


def _measure(question: list[Any]) -> Limits:
    size, repeats = Size(**question[0]), question[1]
    step = _matrices(size)
    return Limits(
        bandwidth={method: _rates(read, GIGABYTE, repeats) for method, read in _readers()},
        sgemm=_rates(_square(), 2 * SQUARE**3, repeats),
        matrices={rows: [1 / rate for rate in _rates(step(rows), 1, repeats)] for rows in ROWS},
    )


def _readers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to read 1 GB once."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    gigabyte = np.ones(GIGABYTE // 4, np.float32)
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        yield f"numpy, {threads} thread{'s' if threads > 1 else ''}", _reader(gigabyte, threads)
    matrix, vector = jax.device_put(gigabyte.reshape(-1, 5000)), jnp.ones(5000, jnp.float32)
    multiply = jax.jit(jnp.matmul)
    yield "jax, matrix and vector", lambda: multiply(matrix, vector).block_until_ready()


def _square() -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    square, multiply = jnp.ones((SQUARE, SQUARE), jnp.float32), jax.jit(jnp.matmul)
    return lambda: multiply(square, square).block_until_ready()


def _reader(array: Any, threads: int) -> Callable[[], object]:
    """Reads all of it once; numpy leaves the GIL for a dot product."""
    import numpy as np

    parts = np.array_split(array, 16)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda part: np.dot(part, part), parts))


def _matrices(size: Size) -> Callable[[int], Callable[[], object]]:
    """All matrices of a decode step by ``rows``, in their order, each fed by the one before, and nothing in between."""
    import jax
    import jax.numpy as jnp

    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = [(size.hidden, q + 2 * kv), (q, size.hidden), (size.hidden, 2 * size.ffn), (size.ffn, size.hidden)]
    keys = iter(jax.random.split(jax.random.key(0), size.layers * len(shapes) + 1))
    weights = [jax.random.normal(next(keys), shape) * 0.01 for _ in range(size.layers) for shape in shapes]
    head = jax.random.normal(next(keys), (size.vocabulary, size.hidden))

    @jax.jit
    def multiply(x: Any, weights: Any, head: Any) -> Any:
        for weight in weights:
            x = x[:, : weight.shape[0]] @ weight
        return x @ head.T

    def step(rows: int) -> Callable[[], object]:
        x = jnp.ones((rows, size.hidden), jnp.float32)
        return lambda: multiply(x, weights, head).block_until_ready()

    return step


def _rates(work: Callable[[], object], amount: float, repeats: int) -> list[float]:
    """Amount a second, of each try after a first one that isn't counted."""
    work()
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - began))
    return rates


if __name__ == "__main__":
    answer_all(_measure)
