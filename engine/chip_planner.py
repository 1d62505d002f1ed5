"""Finds out what serving on a TPU would be like, without one: libtpu compiles the steps that the daemon would run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Device

from caching.metadata import PagedAttentionCacheMetaData, pages_for
from caching.tpu_chip import CHIPS, Chip
from caching.tpu_kernels import TPUKernel
from engine.backend import TPU_PAGE_SIZE, tpu_backend, tpu_kernel
from engine.buckets import covering_buckets
from engine.build import asked_context, check_page_table, fitting_context, page_dtype, weight_bytes
from engine.chip_plan import ChipPlan, DecodeStep, Roofline, batch_sizes
from engine.compiled_bucket import CompiledStep, StepArrays
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.execution_manager import StepShapes
from engine.memory import ACCELERATOR_UTILIZATION, CachePlanner
from engine.mesh import DeviceMesh
from engine.model_step import ModelStep
from engine.models.families import read_config_file
from engine.models.weights import abstract_decoder
from engine.progress import Progress
from engine.topology import chips_of, compiling_for

Report = Callable[[Progress], None]


def plan_chip(config: EngineConfig, path: Path, topology: str, tokens_a_sequence: int, report: Report) -> ChipPlan:
    """Compile the steps that a daemon would for one chip of a topology. ``path`` is a config.json; no weights are needed.

    Raises ConfigurationError, with the arithmetic, where the model does not fit.
    """
    return _Planner(config, path, chips_of(topology)[0]).plan(str(path), topology, tokens_a_sequence, report)


class _Planner:
    def __init__(self, config: EngineConfig, path: Path, device: Device) -> None:
        self._config, self._device = config, device
        self._chip = _known(device)
        self._model, self._dtype = read_config_file(path), np.dtype(config.dtype or jnp.bfloat16)
        self._kv_dtype = page_dtype(config, self._dtype)
        page_size = config.page_size or TPU_PAGE_SIZE
        heads = self._model.num_kv_heads, self._model.head_dim
        self._kernel = tpu_kernel(self._chip, page_size, *heads, self._kv_dtype, config.attention_backend)
        self._backend = tpu_backend(self._chip, self._kernel)
        self._weights = weight_bytes(config, self._model, self._dtype)
        self._budget = int(self._chip.hbm_bytes * (config.hbm_utilization or ACCELERATOR_UTILIZATION))
        self._cache = CachePlanner(
            config,
            self._model,
            asked_context(config, self._model),
            self._backend.one_page(self._model, page_size, self._kv_dtype),
            self._weights,
            self._budget,
        )

    def plan(self, name: str, topology: str, tokens_a_sequence: int, report: Report) -> ChipPlan:
        shapes = self._shapes(self._cache.plan())
        check_page_table(self._config, self._backend, shapes.pages_per_seq)
        steps = self._compile(shapes, report)
        self._cache.count_scratch(max(step.bucket.scratch_bytes for step in steps))
        shapes = self._shapes(self._cache.plan())
        tokens = min(tokens_a_sequence, shapes.max_model_len)
        return ChipPlan(
            model=name,
            topology=topology,
            chip=self._device.device_kind,
            hbm=self._chip.hbm_bytes,
            budget=self._budget,
            weights=self._weights,
            scratch=self._cache.reserved,
            pages=shapes.cache.num_bytes,
            num_pages=shapes.cache.num_pages,
            page_size=shapes.cache.page_size,
            context_tokens=shapes.cache.num_usable_tokens,
            max_model_len=shapes.max_model_len,
            tokens_a_sequence=tokens,
            buckets=[step.bucket for step in steps],
            decode=self._decode(steps, shapes, tokens),
        )

    def _shapes(self, cache: PagedAttentionCacheMetaData) -> StepShapes:
        context = fitting_context(self._config, asked_context(self._config, self._model), cache)
        return StepShapes(
            self._config.max_num_seqs, self._config.max_num_batched_tokens, context, cache, self._backend.smallest_step
        )

    def _compile(self, shapes: StepShapes, report: Report) -> list[CompiledStep]:
        """The steps of the buckets that are reckoned with, ascending."""
        mesh = DeviceMesh((self._device,))
        arrange = partial(self._backend.arrange, activations=self._dtype if self._config.quantization else None)
        decoder = abstract_decoder(self._model, self._dtype, mesh=mesh, arrange=arrange)
        step = ModelStep(decoder, self._backend, shapes.cache, shapes.max_num_seqs, mesh)
        cache = self._backend.abstract_cache(shapes.cache, mesh)
        weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in step.weights]
        arrays = StepArrays(tuple(weights), tuple(jax.tree.leaves(cache)), self._model.num_layers)
        buckets = sorted({*covering_buckets(shapes.buckets), *batch_sizes(shapes.max_num_seqs)})
        compiled = []
        for done, tokens in enumerate(buckets):
            report(Progress("compiling", done, len(buckets), "functions"))
            with compiling_for(mesh):
                lowered = step.lower(shapes.layout(tokens))
            compiled.append(CompiledStep(tokens, lowered, arrays))
        report(Progress("compiling", len(buckets), len(buckets), "functions"))
        return compiled

    def _decode(self, steps: list[CompiledStep], shapes: StepShapes, tokens: int) -> list[DecodeStep]:
        """Of as many sequences as there are pages for, each in the smallest bucket that holds them."""
        weights = np.dtype(self._config.quantization or self._dtype)
        roofline = Roofline(self._chip, self._model, weights, self._kv_dtype, self._weights)
        read = pages_read(self._kernel, self._chip, shapes, tokens)
        found = []
        for sequences in batch_sizes(shapes.max_num_seqs):
            if sequences * pages_for(tokens, shapes.cache.page_size) <= shapes.cache.num_usable_pages:
                step = next(step for step in steps if step.bucket.tokens >= sequences)
                found.append(roofline.step(sequences, tokens, step.moved(sequences * read)))
        return found


def pages_read(kernel: TPUKernel, chip: Chip, shapes: StepShapes, tokens: int) -> int:
    """Bytes that attention reads of one layer's pages for a sequence of so many tokens."""
    cache = shapes.cache
    read = kernel.tokens_read(chip, cache, shapes.pages_per_seq, tokens)
    return read * cache.bytes_per_page // (cache.num_layers * cache.page_size)


def _known(device: Device) -> Chip:
    if device.device_kind not in CHIPS:
        raise ConfigurationError(f"nothing is known of {device.device_kind}: known are {', '.join(CHIPS)}")
    return CHIPS[device.device_kind]
