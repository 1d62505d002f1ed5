"""Reads adapters from directories, in files or in a bucket, into the layout of a slot."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.adapters.adapter import Adapter, AdapterError
from engine.adapters.peft import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    Named,
    PeftConfig,
    named,
    read_config,
    table_copy,
    weight_name,
)
from engine.adapters.places import FusedPlace, Place, Places, places_of
from engine.adapters.slot_arrays import Slots
from engine.errors import ConfigurationError
from engine.hub.names import BUCKET
from engine.live.read_files import open_file
from engine.models.adapters.kernels import AdaptedWeight, Factors
from engine.models.adapters.tables import AdaptedEmbedding, AdaptedHead
from engine.models.weights.sources.tensor_source import FLOATS, TensorSource

MAX_CONFIG_BYTES = 2**20
ALL = slice(None)


@dataclass(frozen=True)
class Pair:
    """Both factors of a module of the file."""

    module: str
    key: str
    """What patterns of ranks and alphas are matched with."""
    place: Place | FusedPlace
    a: Named
    b: Named


@dataclass
class _Read:
    """The factors that were read, by their names: f[rank, in] and f[out, rank] with the scale.

    Ranks are filled up with zeros. Those of experts are f[experts, ...].
    """

    rank: int
    a: dict[str, NDArray[Any]] = field(default_factory=dict)
    b: dict[str, NDArray[Any]] = field(default_factory=dict)

    def put(self, place: Place, a: NDArray[Any], b: NDArray[Any]) -> None:
        """The factors of a module, or of an expert's part."""
        if place.expert is None:
            self.a[place.name], self.b[place.name] = self._filled(a, b)
            return
        (out, inputs), experts = place.shape, place.weight.entry.parameter.shape[0]
        low = self.a.setdefault(place.name, np.zeros((experts, self.rank, inputs), np.float32))
        high = self.b.setdefault(place.name, np.zeros((experts, out, self.rank), np.float32))
        low[place.expert], high[place.expert] = self._filled(a, b)

    def put_fused(self, place: FusedPlace, a: NDArray[Any], b: NDArray[Any]) -> None:
        """The factors f[experts, rank, in] and f[experts, all outputs, rank] of all experts."""
        for name, part in zip(place.names, place.weight.apart(b), strict=True):
            self.a[name], self.b[name] = self._filled(a, part)

    def _filled(self, a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        missing, lead = self.rank - b.shape[-1], [(0, 0)] * (b.ndim - 2)
        return np.pad(a, [*lead, (0, missing), (0, 0)]), np.pad(b, [*lead, (0, 0), (0, missing)])


def check_files(directory: str) -> None:
    """Raises AdapterError where a directory is seen to have no adapter that can be served, whatever the model."""
    with _adapter_errors(directory), _opened(directory) as (content, _):
        read_config(directory, content)


class AdapterReader:
    """Reads adapters for the slots of an engine, on any thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._uids = itertools.count(1)

    def read(self, directory: str) -> Adapter:
        """The adapter in a local directory, or in one of a bucket (``gs://``).

        Raises AdapterError if it is not there or cannot be served.
        """
        with _adapter_errors(directory), _opened(directory) as (content, source):
            config = read_config(directory, content)
            pairs = self._checked(directory, config, source)
            read, swaps = _Read(self._slots.sizes.max_lora_rank), _swaps(config, source, pairs)
            for pair in pairs:
                self._take(directory, config, source, pair, read, swaps=swaps)
        a, b = Factors(read.a), Factors(read.b)
        arrays = [array for kernel in self._slots.kernels for array in _block(kernel, a, b)]
        rank = max(config.rank(pair.key) for pair in pairs)
        return Adapter(next(self._uids), directory, rank, tuple(arrays))

    def check(self, directory: str) -> None:
        """Raises AdapterError as ``read`` does, for all but the numbers of tensors, which are not read."""
        with _adapter_errors(directory), _opened(directory) as (content, source):
            self._checked(directory, read_config(directory, content), source)

    @cached_property
    def _places(self) -> Places:
        return places_of(self._slots)

    def _checked(self, origin: str, config: PeftConfig, source: TensorSource) -> list[Pair]:
        """The modules of the file. Raises AdapterError before any tensor is read."""
        if not source.names:
            raise AdapterError(f"{origin}: {WEIGHTS_FILE} has no tensors")
        if (unknown := self._places.unknown_parameter(config)) is not None:
            raise AdapterError(f"{origin}: target_parameters: {unknown} names nothing that may have an adapter")
        pairs = self._pairs(origin, config, source)
        for pair in pairs:
            self._check(origin, config, source, pair)
        keys = [
            (name, getattr(pair.place, "expert", None))
            for pair in pairs
            for name in (pair.place.names if isinstance(pair.place, FusedPlace) else (pair.place.name,))
        ]
        if len(set(keys)) < len(keys):
            raise AdapterError(f"{origin}: two modules of {WEIGHTS_FILE} adapt the same weight")
        if (missing := self._places.missing(config, set(keys), [pair.module for pair in pairs])) is not None:
            raise AdapterError(f"{origin}: {CONFIG_FILE} names {missing}, of which {WEIGHTS_FILE} has nothing")
        return pairs

    def _pairs(self, origin: str, config: PeftConfig, source: TensorSource) -> list[Pair]:
        found: dict[str, dict[str, Named]] = {}
        unserved = tuple(f"{PREFIX}{one}" for one in self._slots.unserved)
        for name in source.names:
            if name.startswith(unserved):
                continue  # a vision tower's: no text is computed with it
            if (module := table_copy(name)) is not None:
                self._check_copy(origin, source, name, module)
            else:
                tensor = named(origin, name)
                found.setdefault(tensor.module, {})[tensor.factor] = tensor
        if not found:
            raise AdapterError(f"{origin}: {WEIGHTS_FILE} has no factors of what is served here")
        pairs = []
        for module, factors in found.items():
            key, place = self._places.of_module(origin, config, module)
            for factor in "ab":
                if factor not in factors:
                    raise AdapterError(f"{origin}: lora_{factor.upper()} of {module} is missing")
            pairs.append(Pair(module, key, place, factors["a"], factors["b"]))
        return pairs

    def _check(self, origin: str, config: PeftConfig, source: TensorSource, pair: Pair) -> None:
        """Raises AdapterError if a pair does not fit its place."""
        self._places.require_room(origin, pair.module, pair.place)
        rank, most = config.rank(pair.key), self._slots.sizes.max_lora_rank
        if rank > most:
            raise AdapterError(f"{origin}: rank {rank} of {pair.module} is above {most}: raise max_lora_rank")
        is_embedding = isinstance(pair.place, Place) and pair.place.is_embedding
        if is_embedding != pair.a.is_embedding or is_embedding != pair.b.is_embedding:
            raise AdapterError(f"{origin}: {pair.a.stored} is not how PEFT adapts {pair.module}")
        shapes = _shapes(source, pair)
        if shapes not in (fitting := _fitting(pair.place, rank)):
            at = next(at for at in (0, 1) if shapes[at] != fitting[0][at])
            stored, wanted = (pair.a, pair.b)[at].stored, list(fitting[0][at])
            raise AdapterError(f"{origin}: {stored} is {list(shapes[at])} and should be {wanted}")
        for tensor in (pair.a, pair.b):
            stored_as = source.info(tensor.stored).stored_as
            if stored_as not in FLOATS:
                raise AdapterError(
                    f"{origin}: {tensor.stored} is stored as {stored_as}; supported are {', '.join(FLOATS)}"
                )

    def _check_copy(self, origin: str, source: TensorSource, name: str, module: str) -> None:
        """Raises AdapterError if a table that the file has beside its adapter is not the model's."""
        place = self._places.weights.get(weight_name(f"{module}.weight"))
        if place is None or not isinstance(place.weight, AdaptedEmbedding | AdaptedHead):
            raise AdapterError(f"{origin}: {name} is no factor of an adapter")
        wanted = place.shape[::-1] if place.is_embedding else place.shape
        if source.info(name).shape != wanted:
            found = list(source.info(name).shape)
            raise AdapterError(f"{origin}: {name} is {found}, and {list(wanted)} in the model: it has other tokens")

    def _take(
        self, origin: str, config: PeftConfig, source: TensorSource, pair: Pair, read: _Read, *, swaps: bool
    ) -> None:
        """Read both factors of a module; in ``swaps`` PEFT took inputs for outputs where it can have."""
        a, b = (self._numbers(origin, source, tensor.stored) for tensor in (pair.a, pair.b))
        rank = config.rank(pair.key)
        with np.errstate(over="ignore"):
            scale = np.float32(config.scale(pair.key))
            b = scale * b
        if not np.isfinite(b).all():
            raise AdapterError(
                f"{origin}: {pair.b.stored} times its scale of {scale:g} is infinite: lora_alpha is too large"
            )
        if isinstance(pair.place, Place):
            read.put(pair.place, a, b)
            return
        experts, (_, inputs) = pair.place.weight.num_experts, pair.place.weight.shape
        low, high = a.reshape(experts, rank, -1), b.reshape(len(b), rank, experts).transpose(2, 0, 1)
        if swaps and (a.shape, b.shape) == _fitting(pair.place, rank)[1]:
            low, high = high.swapaxes(1, 2), low.swapaxes(1, 2)
        assert low.shape[-1] == inputs
        read.put_fused(pair.place, low, high)

    @staticmethod
    def _numbers(origin: str, source: TensorSource, name: str) -> NDArray[np.float32]:
        whole = source.read(name, (ALL, ALL)).astype(np.float32)
        if not np.isfinite(whole).all():
            raise AdapterError(f"{origin}: {name} holds NaN or infinity")
        return whole


def _shapes(source: TensorSource, pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return source.info(pair.a.stored).shape, source.info(pair.b.stored).shape


def _swaps(config: PeftConfig, source: TensorSource, pairs: list[Pair]) -> bool:
    """Whether PEFT took inputs for outputs in tensors of all experts: in all of a file or in none,
    which those that are square do not tell."""
    fused = (pair for pair in pairs if isinstance(pair.place, FusedPlace))
    return any(_shapes(source, pair) != _fitting(pair.place, config.rank(pair.key))[0] for pair in fused)


def _fitting(place: Place | FusedPlace, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes that both factors may have, the usual ones first.

    PEFT takes a tensor of all experts for [experts, out, in] unless its module says otherwise, as
    that of gpt-oss does, and that of Llama 4, stored alike, does not. Older versions of it took all for
    [experts, in, out].
    """
    if isinstance(place, Place):
        out, inputs = place.shape
        return [((rank, inputs), (out, rank))]
    out, inputs = place.weight.shape
    out, rank = out * len(place.names), rank * place.weight.num_experts
    return [((rank, inputs), (out, rank)), ((rank, out), (inputs, rank))]


def _block(kernel: AdaptedWeight, a: Factors, b: Factors) -> list[NDArray[Any]]:
    """A kernel's arrays of one slot; zeros where nothing is adapted."""
    arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in kernel.leaves(1)]
    for number, layer in enumerate(kernel.entry.sources):
        if any(name in a.arrays for name in kernel.names(layer)):
            for array, part in zip(arrays, kernel.block(layer, a, b), strict=True):
                array[number if kernel.entry.is_stacked else ...] = part
    return arrays


@contextmanager
def _opened(directory: str) -> Iterator[tuple[bytes, TensorSource]]:
    """The content of the configuration, and the tensors."""
    if directory.startswith(BUCKET):
        from engine.models.weights.sources.bucket_source import STREAMS, bucket_checkpoint, bucket_errors, bucket_path

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
    with open_file(path / WEIGHTS_FILE) as source:
        yield config, source


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
