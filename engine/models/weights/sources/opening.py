"""Opens a model's weights, wherever they are and however they are stored."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine.models.weights.sources.checkpoint import open_checkpoint, weight_files, weight_names
from engine.models.weights.sources.easydel import TENSORSTORE_INDEX, easydel_checkpoint
from engine.models.weights.sources.tensor_source import TensorSource


@contextmanager
def open_weights(directory: Path, url: str | None = None) -> Iterator[TensorSource]:
    """The weights of the model in a directory, which are there or in a bucket's.

    Raises ConfigurationError if missing or corrupt, and DownloadFailed.
    """
    if (directory / TENSORSTORE_INDEX).is_file():
        yield easydel_checkpoint(directory, url)
    elif url is None:
        yield open_checkpoint(directory)
    else:
        from engine.models.weights.sources.bucket_source import STREAMS, bucket_checkpoint

        with ThreadPoolExecutor(STREAMS, "bucket") as pool:
            yield bucket_checkpoint(url, weight_names(directory), pool)


def check_weights(directory: Path, url: str | None = None) -> None:
    """Raises ConfigurationError if weights that should be in a directory are not there."""
    if url is None and not (directory / TENSORSTORE_INDEX).is_file():
        weight_files(directory)
