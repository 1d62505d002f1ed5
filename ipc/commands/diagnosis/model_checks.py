"""What would keep a daemon from serving a model, what drafts for it, and adapters.

Each is read as a start reads it, as far as that needs no device, no network and no weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.hub.names import BUCKET, Place, directory_of, place_of, served_name
from engine.hub.roots import Root
from engine.memory.host_memory import available_bytes
from ipc.commands.diagnosis.findings import Finding

if TYPE_CHECKING:
    from engine.models.spec import ModelSpec
    from engine.models.weights.sources.tensor_source import TensorInfo

BITS: Mapping[str | None, int] = {"int8": 8, "w8a8": 8, "int4": 4}
"""Of the numbers of matrices, by ``quantization``."""


def examine(config: EngineConfig, *, on_cpu: bool) -> Iterator[Finding]:
    """The model, the drafter and the adapters that are named, and whether the weights fit."""
    rows = _Rows(config)
    yield _finding("model", rows.model, "name another directory, or put this one right")
    if config.of_draft_model is not None:
        yield _finding("draft model", rows.draft, "name another, or leave speculative_config out")
    if config.lora_modules or config.adapter_root is not None:
        yield _finding("adapters", rows.adapters, "name other directories, or put these right")
    if rows.spec is not None:
        yield memory(rows.served_bytes, available_bytes(), on_cpu=on_cpu)


def _finding(check: str, found: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(check, "good", found())
    except ConfigurationError as error:
        return Finding(check, "bad", str(error), advice)


class _Rows:
    """What is found, in words, of one thing after another. Each raises ConfigurationError as a start does."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._name = config.model or str(config.directory)
        self._served_names = config.served_model_name or ()
        """What requests call the model; nothing where its own name is at fault."""
        self.spec: ModelSpec | None = None
        """None where the network has it, and where it is refused."""
        self.served_bytes = 0
        """Of the weights that were seen, as they are served."""

    def model(self) -> str:
        from engine.hub.obtain import small_files
        from engine.models.generation_config import chosen_generation_config
        from engine.models.model_config import read_model_config

        is_local = _is_local(self._name)
        self._served_names = self._served_names or (served_name(self._name),)
        if not is_local:
            _with_tokenizer(self._config)
            return _of_network(self._name)
        directory = small_files(self._name, self._config.revision)[0]
        model = read_model_config(directory)
        chosen_generation_config(self._config.generation_config, directory)
        config = _with_tokenizer(replace(self._config, model=str(directory), revision=None))
        weights = self._weights(directory, config)
        self._config, self.spec = config, model
        return weights

    def draft(self) -> str:
        from engine.hub.obtain import with_draft_directory
        from engine.speculation.read_draft import read_stored_draft
        from ipc.service.start_up import load_tokenizer

        named = self._config.speculation and self._config.speculation.model
        if named and not _is_local(named):
            return _of_network(named)
        config = with_draft_directory(self._config)
        of_draft = config.of_draft_model
        assert of_draft is not None
        weights = self._weights(of_draft.directory, of_draft) if named else "a layer of the model's own checkpoint"
        if self.spec is None:
            return f"{weights}; whether it fits the model is not known"
        read_stored_draft(config, of_draft, self.spec)
        if _is_local(config.tokenizer or self._name):
            load_tokenizer(config)
        return weights

    def adapters(self) -> str:
        """With the model's sizes, where it is known; the numbers of tensors are seen when they are loaded."""
        from driver.adapters.loader import check_first
        from engine.adapters.reader import check_files

        check_one = check_files if self.spec is None else _fitting(self.spec, self._config)
        config, paths = self._config, self._config.lora_paths
        root = None if config.adapter_root is None else Root(config.adapter_root, "adapter_root")

        def check(directory: str) -> None:
            if not directory.startswith(BUCKET):
                check_one(directory)

        check_first(paths, root, self._served_names, check)
        below = "" if root is None else f"; others are loaded from below {root}"
        return f"{', '.join(paths) or 'none at the start'}{below}"

    def _weights(self, directory: Path, config: EngineConfig) -> str:
        from engine.models.weights.sources.opening import open_weights

        with open_weights(directory) as source:
            tensors = [source.info(name) for name in source.names]
        self.served_bytes += sum(served_bytes(tensor, config.dtype, config.quantization) for tensor in tensors)
        return f"{directory}, {decimal(sum(tensor.nbytes for tensor in tensors))} of weights"


def _fitting(model: "ModelSpec", config: EngineConfig) -> Callable[[str], None]:
    """What checks an adapter of a model. Raises ConfigurationError where its slots are at fault."""
    import numpy as np

    from engine.adapters.reader import AdapterReader
    from engine.adapters.slot_arrays import AdapterSizes, declared_slots
    from engine.models.partition import Partition
    from engine.models.weights.weight_format import Layout

    any_form = np.dtype(np.float32), Layout.AXES  # modules have the same shapes in every form
    sizes = AdapterSizes(config.max_loras, config.max_lora_rank, *any_form, config.lora_target_modules)
    return AdapterReader(declared_slots(Partition(model), sizes)).check


def _with_tokenizer(config: EngineConfig) -> EngineConfig:
    """With the tokenizer's directory. It is read, with the chat template, if it is on this machine."""
    from engine.hub.small_files import NO_VOCABULARY, vocabulary_file
    from ipc.service.start_up import load_tokenizer

    name = config.tokenizer or str(config.model)
    if not _is_local(name):
        return config
    directory = directory_of(name)
    if vocabulary_file(directory) is None:
        raise ConfigurationError(f"{directory} {NO_VOCABULARY}")
    config = replace(config, tokenizer=str(directory))
    load_tokenizer(replace(config, speculative_config=None))
    return config


def _is_local(name: str) -> bool:
    return place_of(name) is Place.DIRECTORY


def _of_network(name: str) -> str:
    return f"{name}: the start asks the network for it"


def served_bytes(tensor: "TensorInfo", dtype: str, quantization: str | None) -> int:
    """About what a tensor takes on a CPU: matrices in as many bits as are asked for, other numbers in
    the dtype of activations, and what is published in 8 bits or fewer as it is."""
    if tensor.dtype.itemsize == 1 or tensor.dtype.kind in "iub":
        return tensor.nbytes
    bits = 16 if dtype == "bfloat16" else 32
    if len(tensor.shape) > 1:
        bits = BITS.get(quantization, bits)
    return math.prod(tensor.shape) * bits // 8


def memory(needed: int, available: int, *, on_cpu: bool) -> Finding:
    """Whether the weights fit; on an accelerator they only pass through, a tensor at a time."""
    found = f"{decimal(available)} available"
    if on_cpu:
        found += f", weights of {decimal(needed)} as they are served"
    if on_cpu and needed > available:
        return Finding("memory", "bad", found, "end what else uses memory, or serve a smaller model")
    if on_cpu and needed > available / 2:
        return Finding("memory", "warning", found, "raise hbm_utilization; the cache will be small")
    return Finding("memory", "good", found)
