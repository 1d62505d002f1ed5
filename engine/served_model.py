"""A model on this machine: its devices, its dtypes and its backend."""

import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from caching.metadata import PagedAttentionCacheMetaData
from caching.paged_attention_cache import PagedAttentionCache
from engine.config import EngineConfig
from engine.devices.device_errors import acquire_devices
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError
from engine.memory.footprint import Footprint
from engine.memory.number_formats import in_words, page_dtype, quantizations
from engine.models.decoder import Decoder
from engine.models.generation_config import GenerationConfig, chosen_generation_config
from engine.models.head_specs import MTPHeadSpec
from engine.models.layers.experts import ExpertsSpec
from engine.models.model_config import read_model_config
from engine.models.partition import Partition, most_devices, split
from engine.models.spec import ModelSpec
from engine.models.weights.sources.fingerprint import fingerprint
from engine.models.weights.sources.opening import check_weights, open_weights
from engine.models.weights.sources.tensor_source import TensorSource
from engine.models.weights.store import AnyDecoder, abstract_decoder, inputs_of_a_scale, parameter_bytes, put
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.speculation.read_draft import read_stored_draft
from engine.step.backend import Backend
from engine.step.backend_choice import choose_backend, default_page_size
from engine.step.kernel_checks.checked_backend import checked, trial_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Decoders(NamedTuple):
    """The model's decoder, and that of the draft model, or the draft head, if there is one."""

    model: Decoder
    draft: AnyDecoder | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model with the operator's settings resolved for this machine. No weight is loaded yet."""

    config: EngineConfig
    partition: Partition
    """The model, sharded over the devices."""
    mesh: DeviceMesh
    backend: Backend
    page_size: int
    dtype: np.dtype[Any]
    """The dtype of activations."""
    kv_dtype: np.dtype[Any]
    """The dtype of keys and values in pages."""
    generation: GenerationConfig
    """The defaults of requests."""
    quantization: str | None
    """The form of the weights, if it is not their dtype."""
    draft: "ServedModel | None" = None
    """The draft model, if there is one. ``backend`` has its backend."""

    @property
    def model(self) -> ModelSpec:
        """The model that is served."""
        return self.partition.model

    @property
    def weights_dtype(self) -> np.dtype[Any]:
        """The dtype of unquantized weights. Stored bfloat16 stays if the kernels widen to float32.

        Results equal float32 weights', for half the memory and, at few rows, half the time.
        """
        exact = self.config.dtype == "auto" and self.model.dtype == "bfloat16" and self.backend.layout is Layout.PANELS
        return np.dtype(jnp.bfloat16) if exact else self.dtype

    @property
    def smaller(self) -> "ServedModel | None":
        """The same in a form of fewer bits, if the operator leaves the choice to us."""
        forms = quantizations(self.config, self.model)
        rest = forms[forms.index(self.quantization) + 1 :]
        return replace(self, quantization=rest[0]) if rest else None

    @property
    def weight_format(self) -> WeightFormat:
        """The format in which steps read the weights."""
        return self.backend.quantized_format(self.weights_dtype, self.dtype, self.quantization, self.partition)

    @cached_property
    def footprint(self) -> Footprint:
        """What it takes of each device."""
        draft = None if self.draft is None else self.draft.footprint
        sizes = self.page_size, self.dtype, self.kv_dtype
        return Footprint(self.config, self.partition, self.backend, *sizes, self.weight_format, draft)

    def allocator(self, pool: PagedAttentionCacheMetaData) -> Callable[[], PagedAttentionCache]:
        """Allocates zeroed pages on every device; raises JaxRuntimeError if out of memory."""
        return self.backend.allocator(pool, self.mesh)

    def abstract(self) -> AnyDecoder:
        """The decoder, or the draft head, of shapes alone."""
        return abstract_decoder(self.partition, self.weight_format, mesh=self.mesh)

    def abstract_all(self) -> Decoders:
        """The decoder, and that of the draft model, of shapes alone."""
        model, draft = self.abstract(), None if self.draft is None else self.draft.abstract()
        assert isinstance(model, Decoder)
        return Decoders(model, draft)

    def load(self, decoder: AnyDecoder, progress: Callable[[int, int], None]) -> str:
        """Give the decoder, or the draft head, its weights; returns the model's fingerprint. Raises as ``put`` does."""
        with self._weights() as source:
            self._put(source, decoder, progress)
            return self._fingerprint(fingerprint(source))

    def load_all(self, decoders: Decoders, progress: Callable[[int, int], None]) -> tuple[str, str]:
        """Give both their weights; returns the fingerprints of the model and of what drafts, "" without weights for
        that. Raises as ``load`` does."""
        of_model = self.load(decoders.model, progress)
        if self.draft is None or decoders.draft is None:
            return of_model, ""
        return of_model, self.draft.load(decoders.draft, progress)

    def _weights(self) -> AbstractContextManager[TensorSource]:
        return open_weights(self.config.directory, self.config.weights_url)

    def _put(self, source: TensorSource, decoder: AnyDecoder, progress: Callable[[int, int], None]) -> None:
        put(source, decoder, self.weight_format, mesh=self.mesh, progress=progress)

    def _fingerprint(self, tensors: int) -> str:
        """What two engines share that make the same tokens of the same, but for rounding: of the model, its tensors,
        what they are rounded to, and the seed. Drafts change no token, and devices do where they change what is
        rounded by one scale."""
        scales = inputs_of_a_scale(self.partition, self.weight_format) if self.quantization in ("int4", "w8a8") else []
        of_adapters = self.dtype.name if self.config.lora_dtype == "auto" else self.config.lora_dtype
        formats = self.dtype.name, self.kv_dtype.name, self.quantization, of_adapters, *scales
        facts = without_addresses(repr((self.model, tensors, formats, self.config.seed)))
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, str]:
        """The model and its device, in words."""
        devices, size = jax.devices(), self.mesh.size
        part = "" if size == len(devices) else f", of {len(devices)}"
        hosts = "" if self.config.hosts is None else f", on {jax.process_count()} hosts"
        numbers = [self.dtype.name]
        if self.quantization:
            numbers.append(f"weights in {in_words(self.quantization, self.partition, self.weight_format)}")
        elif self.weights_dtype != self.dtype:
            numbers.append(f"weights as stored in {self.weights_dtype}")
        if self.model.published is not None:
            numbers[-1] += f", read from {self.model.published.description}"
        if self.kv_dtype != self.dtype:
            numbers.append(f"pages in {self.kv_dtype}")
        others = {"not served": ", ".join(self._unserved)} if self._unserved else {}
        defaults = ", ".join(f"{name} {value:g}" for name, value in self.generation.sampling_params.items())
        return {
            "model": str(self.config.directory),
            "parameters": f"{parameter_bytes(Partition(self.model), WeightFormat(np.dtype(np.float32))) // 4:,}",
            "dtype": ", ".join(numbers),
            "device": f"{size} x {devices[0].device_kind}{part}{hosts}",
            "operations": self.backend.in_words(quantized=self.quantization is not None),
            **others,
            **({"defaults": defaults} if defaults else {}),
        }

    @property
    def _unserved(self) -> list[str]:
        """The parts of the checkpoint that are neither served nor draft."""
        head = None if self.draft is None else self.draft.model.head
        used = head.prefix if isinstance(head, MTPHeadSpec) else None
        return [name for prefix, name in self.model.unserved if prefix != used]


def without_addresses(described: str) -> str:
    """What ``repr`` says, the same in each process."""
    return _ADDRESS.sub("", described)


def served_model(config: EngineConfig) -> ServedModel:
    """Resolve the config on this machine: takes its devices, and compiles kernels if needed.

    Raises DevicesUnavailable, and ConfigurationError if the model or machine cannot serve this.
    """
    model, of_draft = read_model_config(config.directory), config.of_draft_model
    if of_draft is None:
        return _resolved(config, model)
    drafting = read_stored_draft(config, of_draft, model)
    served = _resolved(config, model, drafting if drafting.reads_pages else None)
    try:
        draft = _resolved(replace(of_draft, tensor_parallel_size=served.partition.devices), drafting)
    except ConfigurationError as error:
        raise ConfigurationError(f"the draft model {of_draft.model}: {error}") from error
    return replace(served, draft=draft, backend=replace(served.backend, draft=draft.backend))


def _resolved(config: EngineConfig, model: ModelSpec, reader: ModelSpec | None = None) -> ServedModel:
    """``reader`` reads the model's pages, too, if there is one."""
    check_weights(config.directory, config.weights_url)
    generation = chosen_generation_config(config.generation_config, config.directory)
    acquire_devices()
    partition = split_over_devices(config, model)
    devices = partition.devices
    dtype = np.dtype(jnp.dtype(_default_dtype() if config.dtype == "auto" else config.dtype))
    kv_dtype = page_dtype(config, model, dtype)
    page_size = config.page_size or default_page_size()
    backend = choose_backend(
        page_size,
        model.head_dim,
        kv_dtype,
        devices,
        partition.kv_heads_each,
        config.attention_backend,
        model.attention_extras or (None if reader is None else reader.attention_extras),
        latents=model.has_latents,
    )
    forms = quantizations(config, model)
    has_experts = any(isinstance(block.feed_forward, ExpertsSpec) for block in model.blocks)
    trial = trial_of(backend, partition, page_size, dtype, kv_dtype, reader)
    backend = checked(trial, kv_dtype, int4_experts=has_experts and "int4" in forms)
    mesh = DeviceMesh(tuple(jax.devices()[:devices]))
    return ServedModel(config, partition, mesh, backend, page_size, dtype, kv_dtype, generation, forms[0])


def split_over_devices(config: EngineConfig, model: ModelSpec) -> Partition:
    """Shard a model over the devices. Raises ConfigurationError if it cannot be split so."""
    there, asked = jax.device_count(), config.tensor_parallel_size
    if jax.process_count() > 1:  # every device needs a shard
        if asked not in (None, there):
            raise ConfigurationError(
                f"tensor_parallel_size {asked} is not the {there} devices of all hosts: leave it out"
            )
        return split(model, there)
    if asked is not None and asked > there:
        raise ConfigurationError(
            f"tensor_parallel_size {asked} is more than the {there} devices of this machine: lower it"
        )
    return split(model, asked or (1 if jax.default_backend() == "cpu" else most_devices(model, there)))


def _default_dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
