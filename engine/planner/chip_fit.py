"""Whether a model fits on so many chips of a kind, and with what arithmetic it does not; nothing is compiled for it."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from caching.metadata import PagedAttentionCacheMetaData
from caching.tpu.tpu_chip import Chip
from caching.tpu.tpu_kernels import TPUKernel
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.config import ModelConfig
from engine.models.sharding import spread
from engine.models.weights import parameter_bytes
from engine.served_model import page_dtype
from engine.step.backend import TPU_PAGE_SIZE, Backend, tpu_backend, tpu_kernel
from engine.step.page_budget import ACCELERATOR_UTILIZATION, CachePlanner

MOST_CHIPS = 256
"""Beyond it nobody asks what would fit: it is a whole pod of the smaller kinds."""


@dataclass(frozen=True)
class ChipFit:
    """The memory of one chip, and what a model's part of it takes."""

    config: EngineConfig
    model: ModelConfig
    """As it is split."""
    chip: Chip
    dtype: np.dtype

    @property
    def stored_dtype(self) -> np.dtype:
        """Of the weights."""
        return np.dtype(self.config.quantization or self.dtype)

    @property
    def kv_dtype(self) -> np.dtype:
        """Of the pages."""
        return page_dtype(self.config, self.dtype)

    @property
    def budget(self) -> int:
        """Bytes that may be used."""
        return int(self.chip.hbm_bytes * (self.config.hbm_utilization or ACCELERATOR_UTILIZATION))

    @cached_property
    def weights(self) -> int:
        """Bytes: layers are alike, and two of them tell of all in a fraction of the time."""
        quantized = self.config.quantization is not None
        one, two = (
            parameter_bytes(replace(self.model, num_layers=count), self.dtype, quantized=quantized) for count in (1, 2)
        )
        return one + (self.model.num_layers - 1) * (two - one)

    @cached_property
    def kernel(self) -> TPUKernel:
        """That attends. Raises ConfigurationError where none can."""
        heads = self.model.stored_kv_heads // self.model.tensor_parallel_size, self.model.head_dim
        return tpu_kernel(self.chip, self._page_size, *heads, self.kv_dtype, self.config.attention_backend)

    @property
    def backend(self) -> Backend:
        """What the steps are made of."""
        return tpu_backend(self.chip, self.kernel)

    @property
    def one_page(self) -> PagedAttentionCacheMetaData:
        """The pool of a single page."""
        return self.backend.one_page(self.model, self._page_size, self.kv_dtype)

    @property
    def _page_size(self) -> int:
        return self.config.page_size or TPU_PAGE_SIZE

    def planner(self) -> CachePlanner:
        """Who divides the memory, as in the daemon. Raises ConfigurationError where more context is asked for than the model has."""
        return CachePlanner(self.config, self.model, self.one_page, self.weights, self.budget)

    def check(self, chips: int) -> None:
        """Raises ConfigurationError where the model does not fit, with the arithmetic, and with what it takes instead."""
        scratch, least, page = self.planner().reserved, self.config.max_num_seqs + 1, self.one_page.bytes_per_page
        if self._needed > self.budget:
            raise ConfigurationError(
                f"it does not fit on {self.model.tensor_parallel_size} chips: {self.weights:,} bytes of weights, {scratch:,} of "
                f"scratch and {least} pages of {page:,} (one for each of max_num_seqs {least - 1} sequences, and the sink) are "
                f"{self._needed:,} bytes a chip, and of its {self.chip.hbm_bytes:,} may be used {self.budget:,}. {self._advice(chips)}"
            )

    @property
    def _needed(self) -> int:
        """The fewest bytes that the model can be served in."""
        return self.weights + self.planner().reserved + (self.config.max_num_seqs + 1) * self.one_page.bytes_per_page

    def _advice(self, chips: int) -> str:
        """The smallest number of chips that the model fits on."""
        for count in range(self.model.tensor_parallel_size + 1, MOST_CHIPS + 1):
            if self._fits(count):
                larger = f", which takes a topology of {count} chips" if count > chips else ""
                return f"The smallest that does: tp={count}{larger}"
        return f"No number of chips up to {MOST_CHIPS} does: lower max_num_seqs"

    def _fits(self, chips: int) -> bool:
        try:
            split = replace(self, model=spread(self.model, chips))
        except ConfigurationError:  # it cannot be split over so many
            return False
        return split._needed <= split.budget
