"""Loads a checkpoint's decoder as a backend's steps read it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from engine.mesh import DeviceMesh
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.forms import WeightFormat
from engine.models.weights.sources import open_checkpoint
from engine.models.weights.store import load_decoder

FLOAT32 = WeightFormat(np.dtype(np.float32))


def load(
    directory: Path,
    form: WeightFormat = FLOAT32,
    devices: int = 1,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Decoder:
    """The decoder of a directory, on the first of this machine's devices."""
    mesh = DeviceMesh(tuple(jax.local_devices()[:devices]))
    with open_checkpoint(directory) as checkpoint:
        return load_decoder(
            checkpoint, split(read_model_config(directory), devices), form, mesh=mesh, progress=progress
        )
