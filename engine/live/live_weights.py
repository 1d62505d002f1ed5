"""The weights of an engine, which can be replaced, freed and read again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
from flax import nnx

from engine.errors import ConfigurationError
from engine.hub.names import BUCKET
from engine.live.read_files import open_files
from engine.live.shared_arrays import open_shared
from engine.live.staging import StagedWeights, stage, write
from engine.live.weight_source import (
    Rereadable,
    SharedWeights,
    StartWeights,
    WeightArrays,
    WeightFiles,
    WeightSource,
)
from engine.models.decoder import Decoder
from engine.models.model_config import read_model_config
from engine.models.spec import ModelSpec
from engine.models.weights.placement import delete
from engine.models.weights.sources.easydel import TENSORSTORE_INDEX
from engine.models.weights.sources.opening import open_weights
from engine.models.weights.sources.tensor_source import Arrays, TensorSource
from engine.served_model import ServedModel
from engine.step.compilation import counted_apart
from engine.step.split_decoder import shape_of

MAY_DIFFER = ("dtype", "published", "tensors", "unserved", "further_layers", "eos_token_ids")
"""Fields of a ModelSpec that say how weights are stored and beside what, and the tokens that end an
answer, which stay those of the start. Weights in another published format are not read, but floats
are."""


class LiveWeights:
    """A decoder's weights on this process's devices. Any thread may ``open`` and ``stage``; all
    else is the execution thread's."""

    def __init__(self, served: ServedModel, decoder: Decoder) -> None:
        self._served = served
        self._decoder = decoder
        self.are_there = True
        """Whether the devices have them."""
        self.again: Rereadable | None = StartWeights()
        """From where those can be read again that are, or were, on the devices."""

    @contextmanager
    def open(self, source: WeightSource) -> Iterator[TensorSource]:
        """The tensors of a source. Raises ConfigurationError and DownloadFailed."""
        try:
            with self._opened(source) as tensors:
                yield tensors
        except OSError as error:  # of the disk that has them, or is to have a bucket's small files
            raise ConfigurationError(f"the weights cannot be read: {error}") from error

    @contextmanager
    def _opened(self, source: WeightSource) -> Iterator[TensorSource]:
        config = self._served.config
        match source:
            case StartWeights():
                with _open_files(config.directory, config.weights_url) as tensors:
                    yield tensors
            case WeightFiles(path=path):
                with self._open_path(path) as tensors:
                    yield tensors
            case SharedWeights():
                with open_shared(source.arrays) as tensors:
                    yield tensors
            case WeightArrays():
                yield Arrays(source.arrays)

    def stage(self, number: int, tensors: TensorSource, again: Rereadable | None = None) -> StagedWeights:
        """Read new weights into the host's memory, and check them; all, if they can be read
        ``again``. Raises as ``staging.stage`` does, and DownloadFailed."""
        served = self._served
        return stage(number, tensors, self._decoder, served.weight_format, served.mesh, again)

    def check(self, staged: StagedWeights) -> None:
        """Raises ConfigurationError if only some are new and the others are not there."""
        if not (staged.is_whole or self.are_there):
            raise ConfigurationError(
                f"{staged.origin} has some of the weights alone, and the daemon sleeps without the others: send all, or "
                "wake it first"
            )

    def write(self, staged: StagedWeights) -> None:
        """Replace the weights with those that ``check`` accepts. No step may be in flight.

        Raises jax's errors if the device fails, after which the weights are lost.
        """
        # The functions that merge a part into a parameter are compiled when they are first needed, and so are those that make
        # room for stacked layers again.
        with nullcontext() if staged.is_whole and self.are_there else counted_apart():
            write(staged, self._decoder, self._served.weight_format, self._served.mesh)
        self.are_there, self.again = True, staged.again

    def drop(self) -> None:
        """Free the devices' memory. No step may be in flight."""
        shapes = []
        for path, variable in nnx.to_flat_state(nnx.state(self._decoder)):
            served = variable.get_value()
            shapes.append((path, variable.replace(jax.tree.map(shape_of, served))))
            jax.tree.map(delete, served)
        nnx.update(self._decoder, nnx.from_flat_state(shapes))
        self.are_there = False

    @contextmanager
    def _open_path(self, path: str) -> Iterator[TensorSource]:
        directory, url = Path(path), None
        if path.startswith(BUCKET):
            from engine.hub.bucket import copy_small

            directory, url = copy_small(path), path.rstrip("/")
        if (directory / "config.json").is_file():
            _check_same_model(path, read_model_config(directory), self._served.model)
        with _open_files(directory, url) as tensors:
            yield tensors


@contextmanager
def _open_files(directory: Path, url: str | None) -> Iterator[TensorSource]:
    if url is None and not (directory / TENSORSTORE_INDEX).is_file():
        with open_files(directory) as files:
            yield files
    else:
        with open_weights(directory, url) as tensors:
            yield tensors


def _check_same_model(path: str, theirs: ModelSpec, ours: ModelSpec) -> None:
    """Raises ConfigurationError unless weights of the one may be served as the other."""
    if theirs.published not in (None, ours.published):
        raise ConfigurationError(
            f"{path}: its config.json has another quantization_config than that of the daemon's model, by which weights are "
            "read: save them in that format, or in floats"
        )
    for field in ours.__dataclass_fields__:
        if field not in MAY_DIFFER and getattr(theirs, field) != getattr(ours, field):
            raise ConfigurationError(
                f"{path}: its config.json describes another model than the one that is served: {field} differs"
            )
