"""The assistant of Gemma 4: a small decoder that drafts from a model's pages.

For the last token of a text it reads the model's embedding of it, a *feature* of the token before, and
the keys and values of all tokens before. The feature is the model's hidden state behind its last
norm; of a further draft it is what the assistant made of its own. All drafts are made at the
position of that last token. So the assistant caches nothing.

It may have its vocabulary in clusters, each with a centroid: tokens of the clusters that score highest
have logits, and others are never drafted.

The arithmetic is that of transformers 5 (models/gemma4_assistant, and
SinglePositionMultiTokenCandidateGenerator in generation/candidate_generator.py).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.decoder import Decoder, without_padding
from engine.models.decoder_layer import DecoderLayer
from engine.models.head_specs import AssistantSpec, Clusters
from engine.models.heads.draft_vocabulary import DraftVocabulary
from engine.models.layers.norm import RMSNorm
from engine.models.linear import linear, look_up, table_logits
from engine.models.partition import Partition
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.forms import Weight
from engine.models.weights.parameters import tensors
from engine.vocabulary import NO_TOKEN_LOGIT, Vocabulary


class Assistant(nnx.Module):
    """Tokens and features to hidden states and the next tokens' features, and hidden states to logits."""

    def __init__(self, partition: Partition) -> None:
        model = partition.model
        head = model.head
        assert isinstance(head, AssistantSpec)
        make = ParameterFactory(None, partition.devices, model.num_layers, dict(model.tensors))
        hidden, features = {"hidden": model.hidden_size}, {"columns": head.model_size}
        both = {"columns": 2 * head.model_size}
        self.joint = make.kernel("joint", both, hidden, tensors("pre_projection.weight"))
        self.layers: nnx.List[DecoderLayer] = nnx.List([DecoderLayer(block, partition, make) for block in model.blocks])
        self.norm = RMSNorm("norm", hidden, model.rms_norm_eps, tensors("model.norm.weight"), make)
        self.feature = make.kernel("feature", hidden, features, tensors("post_projection.weight"))
        table = "model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"
        axes = {"vocabulary": partition.padded_vocab_size, **hidden}
        padding = partition.padded_vocab_size - model.vocab_size
        self.lm_head = make.table("lm_head", axes, tensors(table), padding=padding)
        self.clusters = None if head.clusters is None else TokenClusters(head.clusters, partition, make)
        self.partition, self._multiplier = partition, head.embedding_multiplier
        make.require_all_rules_used()

    def shared(self, model: Decoder) -> list[nnx.Param[Weight]]:
        """The model's tables that it reads: the embedding."""
        return [model.embedding]

    def __call__(
        self,
        token_ids: Array,
        features: Array,
        caches: Sequence[LayerCache],
        places: Sequence[tuple[int, Place]],
        step: StepContext,
        shared: Sequence[nnx.Param[Weight]],
    ) -> tuple[list[LayerCache], Array, Array]:
        """i32[...] ids, and f[..., model] the features before them -> caches, f[..., hidden], and the
        next features f[..., model].

        ``caches`` are the model's, and ``places`` where each layer finds what it reads: which of
        these, and where in that. ``shared`` are the tables of that name.
        """
        embedded = look_up(shared[0], token_ids, None, self.partition.axis)
        embedded = (embedded * jnp.asarray(self._multiplier, embedded.dtype)).astype(features.dtype)
        x, written = linear(jnp.concatenate([embedded, features], axis=-1), self.joint, None, None), list(caches)
        for layer, place in zip(self.layers, places, strict=True):
            written, x = layer(x, written, [place], step)
        hidden = self.norm(x)
        return written, hidden, linear(hidden, self.feature, None, None)

    def logits(self, hidden: Array, shared: Sequence[nnx.Param[Weight]]) -> Array:  # noqa: ARG002 - as of an MTPHead
        """f[rows, hidden] -> f32[rows, part] of all tokens, on each device its part; by number if there
        are clusters, and those of no token where none is drafted."""
        found = table_logits(hidden, self.lm_head.get_value(), None)
        logits = without_padding(found, self.partition.model.vocab_size, self.partition.padded_vocab_size)
        return logits if self.clusters is None else self.clusters.chosen_alone(logits, hidden)

    def token_ids(self, numbers: Array) -> Array:
        """i32[rows] places in ``logits`` -> i32[rows] tokens; below 0 as it is."""
        return numbers if self.clusters is None else self.clusters.drafted.token_ids(numbers)

    def over_vocabulary(self, logits: Array, hidden: Array) -> Array:
        """``logits`` of f[rows, hidden] -> f32[rows, part of the vocabulary]."""
        return logits if self.clusters is None else self.clusters.over_vocabulary(logits, hidden)


class TokenClusters(nnx.Module):
    """The vocabulary in clusters: tokens are numbered cluster by cluster, as the table is stored."""

    def __init__(self, spec: Clusters, partition: Partition, make: ParameterFactory) -> None:
        model = partition.model
        inputs, outputs = {"hidden": model.hidden_size}, {"columns": spec.count}
        rule = tensors("masked_embedding.centroids.weight")
        self.centroids = make.kernel("centroids", inputs, outputs, rule, exact=True)
        self.drafted = DraftVocabulary(model.vocab_size, partition, make)
        self._spec, self._partition, self._each = spec, partition, model.vocab_size // spec.count

    def chosen_alone(self, logits: Array, hidden: Array) -> Array:
        """f32[rows, part] by number, those of clusters that f[rows, hidden] does not choose below all."""
        rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        chosen = jnp.zeros((len(logits), self._spec.count), bool).at[rows, self._chosen(hidden)].set(True)
        missing = self._partition.padded_vocab_size - self._partition.model.vocab_size
        by_number = jnp.pad(jnp.repeat(chosen, self._each, axis=1), ((0, 0), (0, missing)))
        first = Vocabulary(self._partition.axis).first(logits.shape[1])
        part = jax.lax.dynamic_slice_in_dim(by_number, first, logits.shape[1], axis=1)
        return jnp.where(part, logits, NO_TOKEN_LOGIT)

    def over_vocabulary(self, logits: Array, hidden: Array) -> Array:
        """f32[rows, part] by number -> f32[rows, part] by token, of those that are chosen."""
        vocabulary, size = Vocabulary(self._partition.axis), logits.shape[1]
        rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        firsts = self._chosen(hidden)[:, :, None] * np.int32(self._each)
        numbers = (firsts + jnp.arange(self._each, dtype=jnp.int32)[None, None]).reshape(len(logits), -1)
        places = vocabulary.place(numbers, size)
        found = jnp.take_along_axis(logits, jnp.minimum(places, np.int32(size - 1)), axis=1)
        found = vocabulary.total(jnp.where(places < size, found, np.float32(0)))
        none = jnp.full(logits.shape, NO_TOKEN_LOGIT)
        return none.at[rows, vocabulary.place(self.drafted.all_tokens()[numbers], size)].set(found, mode="drop")

    def _chosen(self, hidden: Array) -> Array:
        """i32[rows, chosen] the clusters of f[rows, hidden]."""
        return jax.lax.top_k(linear(hidden, self.centroids, None, None), self._spec.chosen)[1]
