"""The safetensors files of a Hugging Face model directory, as a source of tensors."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine.errors import ConfigurationError
from engine.models.weights.sources.safetensors_header import Entry, entries, header_size
from engine.models.weights.sources.tensor_source import TensorInfo, read_dtype

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Content = TypeVar("Content")
File = TypeVar("File")


class _Index(msgspec.Struct):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class Stored(Generic[File]):
    """One tensor of a safetensors file."""

    file: File
    begin: int
    """Of its bytes in the file."""
    entry: Entry

    @property
    def num_bytes(self) -> int:
        """Its bytes in the file."""
        begin, end = self.entry.data_offsets
        return end - begin


class SafetensorsSource(Generic[File]):
    """The part of a TensorSource that headers of safetensors files tell."""

    origin: str
    tensors: Mapping[str, Stored[File]]

    @property
    def names(self) -> Collection[str]:
        """See TensorSource."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """See TensorSource."""
        entry = self.tensors[name].entry
        return TensorInfo(entry.shape, read_dtype(self.origin, name, entry.dtype))

    def beginnings(self, names: Sequence[str], count: int) -> Iterable[bytes]:
        """The first ``count`` bytes of each of these tensors, or all that it has. Raises as ``read``."""
        stored = [self.tensors[name] for name in names]
        return map(self.first_bytes, stored, (min(count, one.num_bytes) for one in stored))

    def first_bytes(self, stored: Stored[File], count: int) -> bytes:
        """So many bytes of a tensor, which has as many."""
        raise NotImplementedError


@dataclass(frozen=True)
class Checkpoint(SafetensorsSource[NDArray[np.uint8]]):
    """A TensorSource of safetensors files mapped into memory, read on demand."""

    origin: str
    tensors: Mapping[str, Stored[NDArray[np.uint8]]]

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        stored, info = self.tensors[name], self.info(name)
        whole = np.frombuffer(stored.file, info.dtype, math.prod(info.shape), stored.begin).reshape(info.shape)
        return whole[index]

    def first_bytes(self, stored: Stored[NDArray[np.uint8]], count: int) -> bytes:
        """See SafetensorsSource."""
        return stored.file[stored.begin : stored.begin + count].tobytes()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Maps a model directory's weight files. Raises ConfigurationError if missing or corrupt."""
    tensors: dict[str, Stored[NDArray[np.uint8]]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="numpy"):  # checks the header against the file
                file = np.memmap(path, np.uint8, "r")
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(
                f"{path} is corrupt, incomplete or no safetensors file ({error}): download it again"
            ) from error
        data = 8 + header_size(file[:8].tobytes())
        found = entries(file[8:data].tobytes())
        tensors |= {name: Stored(file, data + entry.data_offsets[0], entry) for name, entry in found.items()}
    return Checkpoint(str(directory), tensors)


def weight_files(directory: Path) -> list[Path]:
    """A model directory's safetensors files. Raises ConfigurationError if they are missing."""
    paths = [directory / name for name in weight_names(directory)]
    for path in paths:
        if not path.is_file():
            _check_link(path)
            if path.name == SINGLE_FILE:
                raise ConfigurationError(_without_weights(directory))
            raise ConfigurationError(f"{INDEX_FILE} names {path.name}, which is not in {directory}: download it")
    return paths


def weight_names(directory: Path) -> list[str]:
    """The files that have a model's tensors, by what a directory has of them.

    As in transformers an index beside ``model.safetensors`` is not read: it is of other files. Raises
    ConfigurationError if an index names files that are not beside it, or no safetensors files.
    """
    if (directory / SINGLE_FILE).is_file() or not (directory / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    names = sorted(set(read_json(directory / INDEX_FILE, _Index).weight_map.values()))
    for name in names:
        if Path(name).name != name:  # it leads elsewhere, perhaps to where nothing may be read
            raise ConfigurationError(f"{directory / INDEX_FILE} names {name}: it may name files beside it alone")
        if not name.endswith(".safetensors"):
            raise ConfigurationError(f"{directory / INDEX_FILE} names {name!r}: it may name safetensors files alone")
    return names


def config_file(directory: Path, kind: str = "a Hugging Face model") -> Path:
    """The ``config.json`` of a directory. Raises ConfigurationError, with what is to be named, if it
    has none."""
    path = directory / "config.json"
    if not path.is_file():
        _check_link(path)
        raise ConfigurationError(f"{directory} has no config.json: give the directory of {kind}")
    return path


def _check_link(path: Path) -> None:
    """Raises ConfigurationError for a link to a file that is not there: the hub's cache has links alone in a snapshot."""
    if path.is_symlink() and not path.exists():
        raise ConfigurationError(
            f"{path} is a link to {path.readlink()}, which is not there: copy the files that the links of a model name "
            "with it (`cp -rL`), or mount the whole cache"
        )


def read_json(path: Path, shape: type[Content]) -> Content:
    """A JSON file as ``shape``; as transformers writes it, it may have Infinity and NaN for numbers.

    Raises ConfigurationError if it cannot be read as that.
    """
    try:
        content = path.read_bytes()
        try:
            return msgspec.json.decode(content, type=shape)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(content), shape)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): download it again") from error


def _without_weights(directory: Path) -> str:
    """Why a directory with no weight file and no index cannot be served, and what would help."""
    wanted = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if any(directory.glob("*.gguf")):
        return f"{wanted}, only GGUF files, which are not read: give the directory of the same model in safetensors"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return (
            f"{wanted}, only PyTorch pickles, which are not read: write it anew as safetensors, for instance with "
            "transformers' AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)"
        )
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others and all(name.startswith("consolidated") for name in others):
        return (
            f"{wanted}, only {', '.join(others[:3])}, whose tensors have Mistral's own names, which are not read: download "
            "the files of the same model for transformers"
        )
    if others:
        return f"{wanted}, only {', '.join(others[:3])}: add the index or rename the file"
    return f"{wanted}: download the weights into it"


def stored_names(directory: Path) -> Collection[str] | None:
    """The tensors of a model directory; None if its weights are elsewhere."""
    if (directory / SINGLE_FILE).is_file():
        return open_checkpoint(directory).names
    if not (directory / INDEX_FILE).is_file():
        return None
    return read_json(directory / INDEX_FILE, _Index).weight_map.keys()
