"""Run by test_xla_threads.py, on one core: threads dispatch sums over two virtual devices far ahead."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from engine.devices.mesh import COPY, TP, DeviceMesh
from engine.devices.xla_threads import DISPATCHERS, limit_xla_threads

SIZE, SUMS, AHEAD = 256, 4, 200


def layers(x: Array, weight: Array) -> Array:
    """Products whose inputs are split over the devices."""
    part = weight.shape[0]
    for _ in range(SUMS):
        own = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TP) * part, part, 1)
        x = jax.lax.psum(jax.numpy.tanh(own @ weight), TP)
    return x


def dispatch(function: Callable[[Array, Array], Array], weight: Array, x: Array, _: int) -> None:
    """One call after the other of what the one before makes; waits for the last alone."""
    for _ in range(AHEAD):
        x = function(x, weight)
    jax.block_until_ready(x)


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
limit_xla_threads()
mesh = DeviceMesh(tuple(jax.devices()))
rows = PartitionSpec(TP, None)
function = jax.jit(mesh.on_each(layers, (COPY, rows), COPY))
weight = jax.device_put(np.ones((SIZE, SIZE), np.float32), mesh.sharding(*rows))
x = jax.device_put(np.ones((4, SIZE), np.float32), mesh.sharding())
jax.block_until_ready(function(x, weight))
with ThreadPoolExecutor(DISPATCHERS) as pool:
    list(pool.map(partial(dispatch, function, weight, x), range(DISPATCHERS)))
