"""Reads adapters from directories, in files or in a bucket, into the layout of a slot."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.adapters.adapter import Adapter, AdapterError
from engine.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, Named, PeftConfig, named, read_config, weight_name
from engine.adapters.slot_arrays import SlotArrays
from engine.errors import ConfigurationError
from engine.models.adapters.kernels import AdaptedKernel, Factors
from engine.models.weights.safetensors_header import Entry, entries, header_size
from engine.models.weights.sources import FLOATS, SafetensorsSource, Stored, TensorSource

MAX_CONFIG_BYTES = 2**20


class AdapterFile(SafetensorsSource[Path]):
    """A TensorSource of one safetensors file, which is not mapped into memory: it may be replaced
    while it is read."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, DecodeError and OSError if it is no such file."""
        self.origin = str(path)
        with path.open("rb") as file:
            begin = 8 + header_size(file.read(8))
            found: dict[str, Entry] = entries(file.read(begin - 8))
        self.tensors = {name: Stored(path, begin + entry.data_offsets[0], entry) for name, entry in found.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource."""
        stored, info = self.tensors[name], self.info(name)
        with stored.file.open("rb") as file:
            file.seek(stored.begin)
            content = file.read(info.nbytes)
        if len(content) != info.nbytes:
            raise AdapterError(f"{self.origin} ends within {name}: save it again")
        return np.frombuffer(content, info.dtype).reshape(info.shape)[index]


class AdapterReader:
    """Reads adapters for the slots of an engine, on any thread."""

    def __init__(self, slots: SlotArrays) -> None:
        self._slots = slots
        self._uids = itertools.count(1)

    def read(self, directory: str) -> Adapter:
        """The adapter in a local directory, or in one of a bucket (``gs://``).

        Raises AdapterError if it is not there or cannot be served.
        """
        with _adapter_errors(directory), _opened(directory) as (content, source):
            config = read_config(directory, content)
            tensors = [named(directory, name) for name in source.names]
            self._check(directory, config, source, tensors)
            factors: dict[str, dict[str, NDArray[Any]]] = {"a": {}, "b": {}}
            for tensor in tensors:
                name, _ = self._weights[tensor.weight]
                factors[tensor.factor][name] = self._read(directory, config, source, tensor)
        a, b = Factors(factors["a"]), Factors(factors["b"])
        arrays = [array for kernel in self._slots.kernels for array in _block(kernel, a, b)]
        rank = max(config.rank(tensor.module) for tensor in tensors)
        return Adapter(next(self._uids), directory, rank, tuple(arrays))

    @cached_property
    def _weights(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """Of every weight that may have an adapter, its name in the checkpoint, and [out, in]."""
        return {
            weight_name(name): (name, shape)
            for kernel in self._slots.kernels
            for layer in kernel.entry.sources
            for name, shape in kernel.shapes(layer).items()
        }

    def _check(self, origin: str, config: PeftConfig, source: TensorSource, tensors: list[Named]) -> None:
        """Raises AdapterError before any tensor is read."""
        if not tensors:
            raise AdapterError(f"{origin}: {WEIGHTS_FILE} has no tensors")
        most = self._slots.sizes.max_lora_rank
        for tensor in tensors:
            rank = config.rank(tensor.module)
            if rank > most:
                raise AdapterError(f"{origin}: rank {rank} of {tensor.module} is above {most}: raise max_lora_rank")
            if tensor.weight not in self._weights:
                raise AdapterError(f"{origin}: {tensor.module} is no module of this model that may have an adapter")
            _, (out, inputs) = self._weights[tensor.weight]
            wanted, info = (rank, inputs) if tensor.factor == "a" else (out, rank), source.info(tensor.stored)
            if info.shape != wanted:
                raise AdapterError(f"{origin}: {tensor.stored} is {list(info.shape)} and should be {list(wanted)}")
            if info.stored_as not in FLOATS:
                raise AdapterError(
                    f"{origin}: {tensor.stored} is stored as {info.stored_as}; supported are {', '.join(FLOATS)}"
                )
        for factor, other in ("ab", "ba"):
            missing = {one.module for one in tensors if one.factor == factor} - {
                one.module for one in tensors if one.factor == other
            }
            if missing:
                raise AdapterError(f"{origin}: lora_{other.upper()} of {min(missing)} is missing")
        if len({(tensor.weight, tensor.factor) for tensor in tensors}) < len(tensors):
            raise AdapterError(f"{origin}: two modules of {WEIGHTS_FILE} adapt the same weight")

    def _read(self, origin: str, config: PeftConfig, source: TensorSource, tensor: Named) -> NDArray[np.float32]:
        """A factor f32[rank, in], or f32[out, rank] with its scale, with zeros up to the slots' rank."""
        whole = source.read(tensor.stored, (slice(None), slice(None))).astype(np.float32)
        if tensor.factor == "b":
            whole *= np.float32(config.scale(tensor.module))
        if not np.isfinite(whole).all():
            raise AdapterError(f"{origin}: {tensor.stored} holds NaN or infinity")
        missing = self._slots.sizes.max_lora_rank - config.rank(tensor.module)
        return np.pad(whole, [(0, missing), (0, 0)] if tensor.factor == "a" else [(0, 0), (0, missing)])


def _block(kernel: AdaptedKernel, a: Factors, b: Factors) -> list[NDArray[Any]]:
    """A kernel's arrays of one slot; zeros where nothing is adapted."""
    arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in kernel.leaves(1)]
    for number, layer in enumerate(kernel.entry.sources):
        if any(module.format(layer=layer) in a.arrays for module in kernel.modules):
            for array, part in zip(arrays, kernel.block(layer, a, b), strict=True):
                array[number if kernel.entry.is_stacked else ...] = part
    return arrays


@contextmanager
def _opened(directory: str) -> Iterator[tuple[bytes, TensorSource]]:
    """The content of the configuration, and the tensors."""
    if directory.startswith("gs://"):
        from engine.models.weights.bucket_source import STREAMS, bucket_checkpoint, bucket_errors, bucket_path

        with ThreadPoolExecutor(STREAMS, "bucket") as pool:
            with bucket_errors(directory):
                config = bytes((bucket_path(directory) / CONFIG_FILE).read_bytes())
            yield config, bucket_checkpoint(directory, [WEIGHTS_FILE], pool)
        return
    path = Path(directory)
    if (path / "adapter_model.bin").is_file() and not (path / WEIGHTS_FILE).is_file():
        raise AdapterError(f"{directory} has a PyTorch pickle, which is not read: save the adapter as safetensors")
    with (path / CONFIG_FILE).open("rb") as file:
        config = file.read(MAX_CONFIG_BYTES)
    yield config, AdapterFile(path / WEIGHTS_FILE)


@contextmanager
def _adapter_errors(directory: str) -> Iterator[None]:
    """What may go wrong with files, in words."""
    try:
        yield
    except FileNotFoundError as error:
        raise AdapterError(
            f"{directory} has no {Path(error.filename).name}: give the directory of an adapter"
        ) from error
    except OSError as error:
        raise AdapterError(f"{directory} cannot be read: {error.strerror}") from error
    except ConfigurationError as error:
        raise AdapterError(str(error)) from error
    except AdapterError:
        raise
    except (ValueError, msgspec.DecodeError) as error:
        raise AdapterError(f"{directory}: {WEIGHTS_FILE} is corrupt or incomplete ({error}): save it again") from error
