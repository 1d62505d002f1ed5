"""Sources of tensors: a Hugging Face model directory, or arrays in memory."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine.errors import ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Content = TypeVar("Content")


class _Index(msgspec.Struct):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    """float32, float16 or bfloat16."""


class TensorSource(Protocol):
    """Tensors by their names in checkpoints."""

    @property
    def origin(self) -> str:
        """The name of this source in errors."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """A tensor's shape and dtype. Raises ConfigurationError for an unsupported dtype."""

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """Part of a tensor in its stored dtype (bfloat16 is that of ml_dtypes)."""


@dataclass(frozen=True)
class Arrays:
    """A TensorSource of arrays in memory: weights just computed by another program."""

    arrays: Mapping[str, NDArray[Any]]
    origin: str = "arrays in memory"

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.arrays.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        array = self.arrays[name]
        return TensorInfo(array.shape, _served(self.origin, name, array.dtype.name, array.dtype.name))

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        return self.arrays[name][index]


@dataclass(frozen=True)
class Checkpoint:
    """A TensorSource of open safetensors files, read on demand."""

    directory: Path
    files: Mapping[str, Any]
    """By tensor name, its ``safe_open`` file."""

    @property
    def origin(self) -> str:
        """See TensorSource."""
        return str(self.directory)

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.files.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        tensor = self.files[name].get_slice(name)
        stored = tensor.get_dtype()
        return TensorInfo(tuple(tensor.get_shape()), _served(self.origin, name, stored, STORED_DTYPES.get(stored)))

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource; a copy."""
        return np.asarray(self.files[name].get_slice(name)[index])


def _served(origin: str, name: str, stored: str, dtype: str | None) -> str:
    if dtype is None or dtype not in STORED_DTYPES.values():
        raise ConfigurationError(f"{origin}: {name} is stored as {stored}; supported are {', '.join(STORED_DTYPES)}")
    return dtype


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    """Maps a model directory's weight files. Raises ConfigurationError if missing or corrupt."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ConfigurationError(
                    f"{path} is corrupt, incomplete or no safetensors file ({error}): download it again"
                ) from error
            files.update(dict.fromkeys(file.keys(), file))
        yield Checkpoint(directory, files)


def weight_files(directory: Path) -> list[Path]:
    """A model directory's safetensors files. Raises ConfigurationError if they are missing."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).is_file():
        raise ConfigurationError(_without_weights(directory))
    index = read_json(directory / INDEX_FILE, _Index)
    paths = [directory / name for name in sorted(set(index.weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise ConfigurationError(f"{INDEX_FILE} names {path.name}, which is not in {directory}: download it")
    return paths


def read_json(path: Path, shape: type[Content]) -> Content:
    """A JSON file as ``shape``. Raises ConfigurationError if it cannot be read as that."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): download it again") from error


def _without_weights(directory: Path) -> str:
    """Why a directory with no weight file and no index cannot be served, and what would help."""
    wanted = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return (
            f"{wanted}, only PyTorch pickles, which are not read: write it anew as safetensors, for instance with "
            "transformers' AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)"
        )
    if others := sorted(path.name for path in directory.glob("*.safetensors")):
        return f"{wanted}, only {', '.join(others[:3])}: add the index or rename the file"
    return f"{wanted}: download the weights into it"
