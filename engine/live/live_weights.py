"""The weights of an engine, which can be replaced, freed and read again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
from flax import nnx
from jax import Array

from engine.errors import ConfigurationError
from engine.live.read_files import open_files
from engine.live.shared_arrays import open_shared
from engine.live.staging import StagedWeights, stage, write
from engine.live.weight_source import SharedWeights, WeightArrays, WeightFiles, WeightSource
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.spec import ModelSpec
from engine.models.weights.easydel import TENSORSTORE_INDEX
from engine.models.weights.opening import open_weights
from engine.models.weights.sources import Arrays, TensorSource
from engine.models.weights.store import delete, put
from engine.served_model import ServedModel
from engine.step.compilation import counted_apart

BUCKET = "gs://"
MAY_DIFFER = ("dtype", "published", "tensors", "eos_token_ids")
"""Fields of a ModelSpec that say how weights are stored, and the tokens that end an answer, which
stay those of the start."""


class LiveWeights:
    """A decoder's weights on this process's devices. Any thread may ``stage``; all else is the
    execution thread's."""

    def __init__(self, served: ServedModel, decoder: Decoder) -> None:
        self._served = served
        self._decoder = decoder
        self.are_there = True
        """Whether the devices have them."""

    def stage(self, source: WeightSource) -> StagedWeights:
        """Read new weights into the host's memory, and check them.

        Raises ConfigurationError, of which nothing has changed, and DownloadFailed.
        """
        served = self._served
        if served.config.hosts is not None:
            raise ConfigurationError("a daemon of several hosts cannot be given other weights: start it with them")
        with self._open(source) as tensors:
            whole = isinstance(source, WeightFiles)
            return stage(tensors, self._decoder, served.weight_format, served.mesh, whole=whole)

    def write(self, staged: StagedWeights) -> None:
        """Replace the weights. No step may be in flight.

        Raises ConfigurationError if only some are new and the others are not there, and jax's
        errors if the device fails, after which the weights are lost.
        """
        if not (staged.is_whole or self.are_there):
            raise ConfigurationError(
                f"{staged.origin} has some of the weights alone, and the daemon sleeps without the others: send all, or "
                "wake it first"
            )
        # The functions that merge a part into a parameter are compiled when they are first needed.
        with nullcontext() if staged.is_whole else counted_apart():
            write(staged, self._decoder, self._served.weight_format, self._served.mesh)
        self.are_there = True

    def drop(self) -> None:
        """Free the devices' memory. No step may be in flight."""
        shapes = []
        for path, variable in nnx.to_flat_state(nnx.state(self._decoder)):
            served = variable.get_value()
            shapes.append((path, variable.replace(jax.tree.map(_shape, served))))
            jax.tree.map(delete, served)
        nnx.update(self._decoder, nnx.from_flat_state(shapes))
        self.are_there = False

    def load(self) -> None:
        """Read the weights that the daemon was started with, as at its start.

        Raises ConfigurationError and DownloadFailed; the devices have none then.
        """
        served = self._served
        try:
            with open_weights(served.config.directory, served.config.weights_url) as source:
                put(source, self._decoder, served.weight_format, mesh=served.mesh, progress=lambda _, __: None)
        except BaseException:
            self.drop()
            raise
        self.are_there = True

    @contextmanager
    def _open(self, source: WeightSource) -> Iterator[TensorSource]:
        match source:
            case WeightFiles():
                with self._open_files(source.path) as tensors:
                    yield tensors
            case SharedWeights():
                with open_shared(source.arrays) as tensors:
                    yield tensors
            case WeightArrays():
                yield Arrays(source.arrays)

    @contextmanager
    def _open_files(self, path: str) -> Iterator[TensorSource]:
        directory, url = Path(path), None
        if path.startswith(BUCKET):
            from engine.hub.bucket import copy_small

            directory, url = copy_small(path), path.rstrip("/")
        if (directory / "config.json").is_file():
            _check_same_model(path, read_model_config(directory), self._served.model)
        if url is None and not (directory / TENSORSTORE_INDEX).is_file():
            with open_files(directory) as files:
                yield files
        else:
            with open_weights(directory, url) as tensors:
                yield tensors


def _check_same_model(path: str, theirs: ModelSpec, ours: ModelSpec) -> None:
    """Raises ConfigurationError unless weights of the one may be served as the other."""
    for field in ours.__dataclass_fields__:
        if field not in MAY_DIFFER and getattr(theirs, field) != getattr(ours, field):
            raise ConfigurationError(
                f"{path}: its config.json describes another model than the one that is served: {field} differs"
            )


def _shape(leaf: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
