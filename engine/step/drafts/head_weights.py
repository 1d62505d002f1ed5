"""A draft head's weights, and those of the model that it reads, as the programs of a step take them."""

from typing import Any, Generic, TypeVar, cast

import jax
from flax import nnx
from jax import Array

from engine.models.decoder import Decoder
from engine.models.heads.draft_head import DraftHead
from engine.models.weights.forms import Weight
from engine.sampling.operations import SamplingOperations
from engine.sampling.sampler import greedy
from engine.sampling.sampler_inputs import SamplerInputs
from engine.step.split_decoder import SplitDecoder, spec_of
from engine.vocabulary import Vocabulary

Head = TypeVar("Head", bound=DraftHead)


class HeadWeights(Generic[Head]):
    """``model`` has the tables that the head shares."""

    def __init__(self, head: Head, model: Decoder) -> None:
        self._head, self._split, self._model = head, SplitDecoder(head), model

    @property
    def all(self) -> list[Array]:
        """What the programs take; those of the model's tables, as they are now, come last."""
        return self._split.weights + jax.tree.leaves(self._shared_values)

    @property
    def specs(self) -> list[Any]:
        """How these are sharded."""
        return [spec_of(leaf.sharding) for leaf in self.all]

    def head(self, weights: list[Array]) -> Head:
        """The head with the arrays that are given."""
        state = self._split.state(weights[: len(self._split.weights)])
        return cast(Head, self._split.decoder(state))

    def shared(self, weights: list[Array]) -> list[nnx.Param[Weight]]:
        """The model's tables that the head reads, with the arrays that are given of them."""
        structure = jax.tree.structure(self._shared_values)
        values = jax.tree.unflatten(structure, weights[len(self._split.weights) :])
        tables = (table.replace(value) for table, value in zip(self._tables, values, strict=True))
        return cast("list[nnx.Param[Weight]]", list(tables))

    def drafts(
        self, weights: list[Array], hidden: Array, inputs: SamplerInputs, key: Array, sampling: SamplingOperations
    ) -> Array:
        """See DraftPass."""
        head, vocabulary = self.head(weights), Vocabulary(self._head.partition.axis)
        logits = head.logits(hidden, self.shared(weights))
        return sampling.choose(
            inputs.rows,
            lambda: sampling.sample(head.over_vocabulary(logits, hidden), inputs.rows, key, vocabulary),
            lambda: head.token_ids(greedy(logits, vocabulary)),
        )

    @property
    def _tables(self) -> list[nnx.Param[Weight]]:
        return self._head.shared(self._model)

    @property
    def _shared_values(self) -> list[Weight]:
        return [table.get_value() for table in self._tables]
