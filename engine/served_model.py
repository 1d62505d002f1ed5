"""A model as this machine serves it: over which devices, in which numbers, by which operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import NAMES
from caching.paged_attention_cache import PagedAttentionCache
from engine.config import EngineConfig
from engine.device_errors import acquire_devices
from engine.errors import ConfigurationError
from engine.mesh import DeviceMesh
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.sharding import most_devices, spread
from engine.models.weights import load_decoder, parameter_bytes
from engine.step.backend import Backend, choose_backend, default_page_size


@dataclass(frozen=True)
class ServedModel:
    """What an operator's settings come to for one model on this machine; no weight has been read."""

    config: EngineConfig
    model: ModelConfig
    """As it is spread over the devices."""
    mesh: DeviceMesh
    backend: Backend
    page_size: int
    dtype: np.dtype[Any]
    """Of activations."""
    kv_dtype: np.dtype[Any]
    """Of keys and values in pages."""

    @property
    def weights_dtype(self) -> np.dtype[Any]:
        """Of weights that are not quantized: bfloat16 ones stay so where kernels read them as the float32 they stand for.

        That gives the same numbers as float32 weights for half the memory and, at few rows, in half the time.
        """
        exact = self.config.dtype is None and self.model.dtype == "bfloat16" and self.backend.packs
        return np.dtype(jnp.bfloat16) if exact else self.dtype

    @property
    def weight_bytes(self) -> int:
        """What each device holds of the weights."""
        return parameter_bytes(self.model, self.weights_dtype, quantized=self.config.quantization is not None)

    @property
    def one_page(self) -> PagedAttentionCacheMetaData:
        """A device's pool of a single page."""
        return self.backend.one_page(self.model, self.page_size, self.kv_dtype)

    def allocator(self, pool: PagedAttentionCacheMetaData) -> Callable[[], PagedAttentionCache]:
        """Makes zeroed pages on every device; raises jax.errors.JaxRuntimeError where they do not fit."""
        return self.backend.allocator(pool, self.mesh)

    def load(self, progress: Callable[[int, int], None]) -> Decoder:
        """The decoder with its weights, in the form that steps read. Raises as ``load_decoder`` does."""
        decoder = load_decoder(
            self.config.directory,
            self.model,
            self.weights_dtype,
            mesh=self.mesh,
            arrange=partial(self.backend.arrange, activations=self.dtype if self.config.quantization else None),
            progress=progress,
        )
        self.backend.prepare(decoder)
        return decoder

    def describe(self) -> dict[str, str]:
        """What is served, and on what, for people to read."""
        devices, size = jax.devices(), self.mesh.size
        part = "" if size == len(devices) else f", of {len(devices)}"
        hosts = "" if self.config.hosts is None else f", on {jax.process_count()} hosts"
        numbers = [self.dtype.name]
        if self.config.quantization:
            numbers.append(f"weights in {self.config.quantization}")
        elif self.weights_dtype != self.dtype:
            numbers.append(f"weights as stored in {self.weights_dtype}")
        if self.kv_dtype != self.dtype:
            numbers.append(f"pages in {self.kv_dtype}")
        return {
            "model": str(self.config.directory),
            "parameters": f"{parameter_bytes(read_model_config(self.config.directory), jnp.float32) // 4:,}",
            "dtype": ", ".join(numbers),
            "device": f"{size} x {devices[0].device_kind}{part}{hosts}",
            "operations": self.backend.description,
        }


def served_model(config: EngineConfig) -> ServedModel:
    """What is to be served, on this machine's devices, which are taken; compiles kernels if that has not been done.

    Raises ConfigurationError where the model or the machine cannot do what is asked, and DevicesUnavailable.
    """
    model = read_model_config(config.directory)
    acquire_devices()
    model = spread_over_devices(config, model)
    devices = model.tensor_parallel_size
    dtype = np.dtype(jnp.dtype(config.dtype or _default_dtype()))
    kv_dtype = page_dtype(config, dtype)
    page_size = config.page_size or default_page_size()
    backend = choose_backend(
        page_size, model.head_dim, kv_dtype, devices, model.stored_kv_heads // devices, config.attention_backend
    )
    return ServedModel(config, model, DeviceMesh(tuple(jax.devices()[:devices])), backend, page_size, dtype, kv_dtype)


def spread_over_devices(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """A model as this machine's devices serve it. Raises ConfigurationError where it cannot be split as was asked."""
    there, asked = jax.device_count(), config.tensor_parallel_size
    if jax.process_count() > 1:  # none may be left without a part
        if asked not in (None, there):
            raise ConfigurationError(
                f"tensor_parallel_size {asked} is not the {there} devices of all hosts: leave it out"
            )
        return spread(model, there)
    if asked is not None and asked > there:
        raise ConfigurationError(
            f"tensor_parallel_size {asked} is more than the {there} devices of this machine: lower it"
        )
    return spread(model, asked or (1 if jax.default_backend() == "cpu" else most_devices(model, there)))


def page_dtype(config: EngineConfig, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of keys and values in pages, where activations are of ``dtype``."""
    return dtype if config.kv_cache_dtype == "auto" else NAMES[config.kv_cache_dtype]


def _default_dtype() -> str:
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
