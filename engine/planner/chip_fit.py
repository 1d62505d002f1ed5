"""Whether a model fits on a number of chips, by arithmetic alone; nothing is compiled."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from caching.tpu.tpu_chip import Chip
from caching.tpu.tpu_kernels import TPUKernel
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.memory.device_memory import ACCELERATOR_UTILIZATION
from engine.memory.footprint import Footprint
from engine.memory.number_formats import page_dtype, quantizations
from engine.memory.page_budget import CachePlanner
from engine.models.partition import Partition, split
from engine.models.weights.weight_format import WeightFormat
from engine.step.backend import Backend
from engine.step.backend_choice import TPU_PAGE_SIZE, tpu_backend, tpu_kernel

MOST_CHIPS = 256
"""The search stops here: a whole pod of the smaller kinds."""


@dataclass(frozen=True)
class ChipFit:
    """The memory of one chip, and the use that a model's shard makes of it."""

    config: EngineConfig
    partition: Partition
    """The model, sharded over the chips."""
    chip: Chip
    dtype: np.dtype
    draft: "ChipFit | None" = None
    """The draft model, if there is one."""

    @cached_property
    def quantization(self) -> str | None:
        """The form of the weights, if it is not their dtype: the first that fits, or the last."""
        *larger, last = quantizations(self.config, self.partition.model)
        return next((form for form in larger if self._fits_in(form)), last)

    def _fits_in(self, form: str | None) -> bool:
        fit = replace(self, config=replace(self.config, quantization=form))
        return fit._needed <= fit.budget

    @property
    def kv_dtype(self) -> np.dtype:
        """The dtype of the pages."""
        return page_dtype(self.config, self.partition.model, self.dtype)

    @property
    def budget(self) -> int:
        """Bytes of a chip that may be used."""
        return int(self.chip.hbm_bytes * (self.config.hbm_utilization or ACCELERATOR_UTILIZATION))

    @property
    def weight_format(self) -> WeightFormat:
        """The format in which steps read the weights."""
        return self.backend.quantized_format(self.dtype, self.dtype, self.quantization, self.partition)

    @cached_property
    def kernel(self) -> TPUKernel:
        """The attention kernel. Raises ConfigurationError if none fits."""
        model = self.partition.model
        heads, asked = (self.partition.kv_heads_each, model.head_dim), self.config.attention_backend
        extras, latents = model.attention_extras, model.has_latents
        if self.draft is not None and self.draft.partition.model.reads_pages:
            extras = extras or self.draft.partition.model.attention_extras
        return tpu_kernel(self.chip, self._page_size, *heads, self.kv_dtype, asked, extras=extras, latents=latents)

    @property
    def backend(self) -> Backend:
        """The backend of the steps."""
        return replace(tpu_backend(self.chip, self.kernel), draft=None if self.draft is None else self.draft.backend)

    @cached_property
    def footprint(self) -> Footprint:
        """What the shard takes of a chip."""
        draft = None if self.draft is None else self.draft.footprint
        sizes = self._page_size, self.dtype, self.kv_dtype
        return Footprint(self.config, self.partition, self.backend, *sizes, self.weight_format, draft)

    @property
    def _page_size(self) -> int:
        return self.config.page_size or TPU_PAGE_SIZE

    def planner(self) -> CachePlanner:
        """The daemon's planner. Raises ConfigurationError if the context exceeds the model's."""
        return self.footprint.planner(self.budget)

    def check(self, chips: int) -> None:
        """Raises ConfigurationError if the model does not fit, with arithmetic and a remedy."""
        planner = self.planner()
        if self._needed > self.budget:
            devices = self.partition.devices
            raise ConfigurationError(
                f"it does not fit on {devices} chip{'s' if devices > 1 else ''}: {self.footprint.resident_bytes:,} bytes of weights, "
                f"{planner.reserved:,} of scratch and {planner.least_described} are {self._needed:,} bytes a chip, and of its "
                f"{self.chip.hbm_bytes:,} may be used {self.budget:,}. {self._advice(chips)}"
            )

    @property
    def _needed(self) -> int:
        """The fewest bytes in which the model can be served."""
        planner = self.planner()
        return self.footprint.resident_bytes + planner.reserved + planner.least_bytes

    def _advice(self, chips: int) -> str:
        """The smallest number of chips on which the model fits, in words."""
        for count in range(self.partition.devices + 1, MOST_CHIPS + 1):
            if self._fits(count):
                larger = f", which takes a topology of at least {count} chips" if count > chips else ""
                return f"The smallest that does: tp={count}{larger}"
        return (
            f"No number of chips up to {MOST_CHIPS} does: lower max_num_seqs or max_num_batched_tokens, raise "
            "hbm_utilization, or set quantization"
        )

    def _fits(self, chips: int) -> bool:
        try:
            draft = self.draft
            if draft is not None:
                draft = replace(draft, partition=split(draft.partition.model, chips))
            fit = replace(self, partition=split(self.partition.model, chips), draft=draft)
        except ConfigurationError:  # not divisible by so many
            return False
        return fit._needed <= fit.budget
