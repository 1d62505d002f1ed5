"""The rates of memory, arithmetic, copies between host and device, and collectives."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from caching.tpu.tpu_chip import Chip
from engine.hardware.measurement import Measurement, Scale, seconds
from engine.planner.hlo_traffic import Collective
from engine.planner.ici import exchange_seconds

DISPATCHES = 100
STEP_ROWS, STEP_WIDTH = 64, 4096
"""A decoding step's activations, which chips sum twice a layer."""
AXIS = "chips"


def measure_memory(scale: Scale, chip: Chip | None) -> Iterator[Measurement]:
    """Rates of one device's memory and of its products."""
    numbers = jnp.ones(scale.large_bytes // 4, jnp.float32)
    expected = None if chip is None else chip.hbm_bandwidth / 1e9
    copied = 2 * numbers.nbytes / seconds(jax.jit(lambda x: x + np.float32(1)), numbers) / 1e9
    yield Measurement(section="memory", what="read and write", value=copied, unit="GB/s", expected=expected)
    read = numbers.nbytes / seconds(jax.jit(jnp.sum), numbers) / 1e9
    yield Measurement(section="memory", what="read", value=read, unit="GB/s", expected=expected)
    del numbers
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    matrix = jnp.ones((scale.matrix, scale.matrix), dtype)
    rate = 2 * scale.matrix**3 / seconds(jax.jit(jnp.matmul), matrix, matrix) / 1e12
    yield Measurement(
        section="arithmetic",
        what=f"product of {scale.matrix} x {scale.matrix}, {np.dtype(dtype)}",
        value=rate,
        unit="TFLOP/s",
        expected=None if chip is None else chip.bf16_flops / 1e12,
    )


def measure_host(scale: Scale) -> Iterator[Measurement]:
    """Copies to and from one device, large and as small as a step's, and dispatches."""
    device = jax.local_devices()[0]
    large = np.ones(scale.large_bytes // 4, np.float32)
    to_device = large.nbytes / seconds(jax.device_put, large, device) / 1e9
    yield Measurement(section="host", what="to the device", value=to_device, unit="GB/s")
    fresh = jax.jit(lambda x: x + np.float32(1))  # an array keeps the copy that numpy had of it
    there = jax.device_put(large, device)
    computed = seconds(fresh, there)
    back = large.nbytes / max(1e-9, seconds(lambda x: np.asarray(fresh(x)), there) - computed) / 1e9
    yield Measurement(section="host", what="from the device", value=back, unit="GB/s")
    ids = np.ones(STEP_ROWS, np.int32)
    add = jax.jit(lambda x: x + np.int32(1))
    there_and_back = seconds(lambda: np.asarray(add(ids)))
    yield Measurement(section="host", what="a step's round trip", value=1e6 * there_and_back, unit="us")

    def dispatch(x: Array) -> Array:
        for _ in range(DISPATCHES):
            x = add(x)
        return x

    each = seconds(dispatch, jnp.asarray(ids)) / DISPATCHES
    yield Measurement(section="host", what="one of many dispatches", value=1e6 * each, unit="us")


def measure_collectives(scale: Scale, chip: Chip | None) -> Iterator[Measurement]:
    """All-reduces and all-gathers over all devices, with their results checked."""
    devices = jax.devices()
    if len(devices) == 1:
        yield Measurement(section="collectives", what="all", state="not measured", note="there is one device")
        return
    mesh = Mesh(np.array(devices), (AXIS,))
    for what, count in (("as in a decoding step", STEP_ROWS * STEP_WIDTH), ("large", scale.large_bytes // 16)):
        yield _collective(mesh, chip, "all-reduce", what, count)
        yield _collective(mesh, chip, "all-gather", what, count // len(devices))


def _collective(mesh: Mesh, chip: Chip | None, kind: str, what: str, part: int) -> Measurement:
    """Each device has ``part`` numbers, all of them its own number from 1 on."""

    def exchange(x: Array) -> Array:
        exchanged: Array = (
            jax.lax.psum(x, AXIS) if kind == "all-reduce" else jax.lax.all_gather(x, AXIS, axis=0, tiled=True)
        )
        return exchanged

    numbers = np.repeat(np.arange(1, mesh.size + 1, dtype=np.float32), part)
    there = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(AXIS)))
    run = jax.jit(
        jax.shard_map(exchange, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(), check_vma=False)
    )
    result, taken = np.asarray(run(there)), seconds(run, there)
    total = np.full(part, mesh.size * (mesh.size + 1) / 2, np.float32)
    is_right = np.array_equal(result, total if kind == "all-reduce" else numbers)
    exchanged = Collective(kind, result.nbytes, (), 1, 0)
    return Measurement(
        section="collectives",
        what=f"{kind}, {what}: {result.nbytes:,} bytes on {mesh.size} devices",
        value=1e6 * taken,
        unit="us",
        expected=None if chip is None else 1e6 * exchange_seconds(exchanged, chip, mesh.size),
        state="good" if is_right else "bad",
        note="" if is_right else "its result is wrong",
    )
