"""Loads a checkpoint's decoder as a backend's steps read it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from engine.devices.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.store import load_decoder
from engine.models.weights.weight_format import WeightFormat

FLOAT32 = WeightFormat(np.dtype(np.float32))


def load(
    directory: Path,
    form: WeightFormat = FLOAT32,
    devices: int = 1,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Decoder:
    """The decoder of a directory, on the first of this machine's devices."""
    mesh = DeviceMesh(tuple(jax.local_devices()[:devices]))
    partition = split(read_model_config(directory), devices)
    return load_decoder(open_checkpoint(directory), partition, form, mesh=mesh, progress=progress)
