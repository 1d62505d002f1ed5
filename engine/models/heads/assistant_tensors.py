"""The tensors of an assistant of Gemma 4, under the names that its parameters call for."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.models.heads.head_tensors import DrafterTensors, token_offsets
from engine.models.weights.parameters import TOKENS
from engine.models.weights.sources.tensor_source import HEAD

ORDERING = "masked_embedding.token_ordering"
TABLES = ("model.embed_tokens.weight", HEAD)


class AssistantTensors(DrafterTensors):
    """A TensorSource. If tokens are in clusters, the rows of the tables are in their order."""

    def renamed(self, name: str) -> str | None:
        """See RenamedTensors."""
        return TOKENS if name == ORDERING else name

    def read(self, name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        """See TensorSource. Raises ConfigurationError for an order that has no tokens, or one twice."""
        if name == TOKENS:
            return token_offsets(self._order, self.vocab_size, self.origin, ORDERING)[index]
        if name in TABLES and TOKENS in self.names:
            whole = self.source.read(name, (slice(None), *index[1:]))
            return whole[self._order[index[0]]]
        return super().read(name, index)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return self.source.read(ORDERING, (slice(None),)).astype(np.int64)
