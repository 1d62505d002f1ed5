"""What a model takes of each device, by arithmetic alone: on this machine, or on chips that are not there."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from caching.metadata import PagedAttentionCacheMetaData
from caching.page_dtype import NAMES
from engine.adapters.slot_arrays import AdapterSizes, adapter_bytes
from engine.config import EngineConfig
from engine.memory.page_budget import CachePlanner
from engine.models.partition import Partition
from engine.models.weights.store import parameter_bytes
from engine.models.weights.weight_format import WeightFormat
from engine.step.backend import Backend, with_draft


@dataclass(frozen=True)
class Footprint:
    """A model's part of a device."""

    config: EngineConfig
    partition: Partition
    backend: Backend
    page_size: int
    dtype: np.dtype[Any]
    """The dtype of activations."""
    kv_dtype: np.dtype[Any]
    """The dtype of keys and values in pages."""
    weight_format: WeightFormat
    draft: "Footprint | None" = None
    """The draft model's, if there is one."""

    @cached_property
    def weight_bytes(self) -> int:
        """Of the model's weights."""
        return parameter_bytes(self.partition, self.weight_format)

    @property
    def draft_bytes(self) -> int:
        """Of the draft model's weights."""
        return 0 if self.draft is None else self.draft.weight_bytes

    @property
    def adapter_sizes(self) -> AdapterSizes | None:
        """The slots of adapters, if the operator wants such."""
        return adapter_sizes(self.config, self.dtype, self.backend)

    @cached_property
    def adapter_bytes(self) -> int:
        """Of the slots of adapters."""
        return adapter_bytes(self.partition, self.adapter_sizes)

    @property
    def resident_bytes(self) -> int:
        """Of all weights: the model's, a draft model's and adapters'."""
        return self.weight_bytes + self.adapter_bytes + self.draft_bytes

    @property
    def one_page(self) -> PagedAttentionCacheMetaData:
        """A pool of one page and one slot."""
        draft, speculation = self.draft, self.config.speculation
        page = self.backend.one_page(self.partition, self.page_size, self.kv_dtype, self.dtype, speculation)
        if draft is None or speculation is None:
            return page
        return with_draft(page, draft.one_page, draft.partition.model, speculation.num_speculative_tokens, self.dtype)

    def planner(self, budget: int) -> CachePlanner:
        """Sizes the pool within ``budget`` bytes. ConfigurationError if the context exceeds the model's."""
        sampling = self.backend.sampling
        return CachePlanner(self.config, self.partition, self.one_page, self.resident_bytes, budget, sampling)


def adapter_sizes(config: EngineConfig, dtype: np.dtype[Any], backend: Backend) -> AdapterSizes | None:
    """The slots of adapters beside activations of ``dtype``, if the operator wants such."""
    if not config.enable_lora:
        return None
    dtype = dtype if config.lora_dtype == "auto" else NAMES[config.lora_dtype]
    return AdapterSizes(config.max_loras, config.max_lora_rank, dtype, backend.layout, config.lora_target_modules)
