"""The draft head of EAGLE-3 (Li et al. 2025): one layer that drafts from a model's hidden states.

For the token at a position it reads the token itself, and a *feature* of the position before: what
``fc`` makes of three hidden states that the model has there, or where that is a draft itself, the
head's own hidden state. So what it caches of a token follows from this and earlier tokens alone.
The first token has no position before it, and no other sees it (``AttentionSpec.first``).

Its tensors and arithmetic are those of vLLM 0.11 (vllm/model_executor/models/llama_eagle3.py),
which counts each position one less; rotary embedding knows differences alone.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from engine.models.decoder import Decoder, without_padding
from engine.models.head_specs import EagleHeadSpec
from engine.models.heads.draft_vocabulary import DraftVocabulary
from engine.models.layers.norm import RMSNorm
from engine.models.linear import linear, look_up, table_logits
from engine.models.partition import Partition
from engine.models.spec import BlockSpec
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.forms import Weight
from engine.models.weights.parameters import LAYER, tensors
from engine.vocabulary import padded_vocab_size


class HeadLayer(nnx.Module):
    """Attention over a token's embedding beside a feature, and a feed-forward."""

    def __init__(self, spec: BlockSpec, head: EagleHeadSpec, partition: Partition, make: ParameterFactory) -> None:
        assert spec.mixer is not None and spec.feed_forward is not None
        model = partition.model

        def norm(name: str, stored: str) -> RMSNorm:
            rule = tensors(f"{LAYER}{stored}.weight")
            return RMSNorm(name, {"hidden": model.hidden_size}, model.rms_norm_eps, rule, make)

        self.embedding_norm = norm("embedding_norm", "input_layernorm")
        self.feature_norm = norm("feature_norm", "hidden_norm")
        self.mixer = spec.mixer.build(partition, make)
        self.mlp_norm = norm("mlp_norm", "post_attention_layernorm")
        self.mlp = spec.feed_forward.build(model.hidden_size, make)
        self.adds_normed = head.adds_normed

    def __call__(
        self, embedded: Array, features: Array, cache: LayerCache, step: StepContext
    ) -> tuple[LayerCache, Array]:
        """f[..., hidden] each -> the updated cache, f[..., hidden]."""
        normed = self.feature_norm(features)
        x = normed if self.adds_normed else features
        inputs = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        cache, mixed = self.mixer(inputs, cache, Place(0, None), step)
        x = x + mixed
        return cache, x + self.mlp(self.mlp_norm(x), step)


class EagleHead(nnx.Module):
    """Tokens and features to hidden states, which are the next tokens' features, and these to
    logits of the tokens that it drafts."""

    def __init__(self, partition: Partition) -> None:
        model = partition.model
        (block,), head = model.blocks, model.head
        assert isinstance(head, EagleHeadSpec)
        make = ParameterFactory(None, partition.devices, model.num_layers, dict(model.tensors))
        hidden, padded = {"hidden": model.hidden_size}, partition.padded_vocab_size
        embedding = {"vocabulary": padded, **hidden}, tensors("model.embed_tokens.weight")
        self.embedding = (
            make.table("embedding", *embedding, padding=padded - model.vocab_size) if head.has_embedding else None
        )
        tapped = {"columns": len(head.taps) * head.tapped_size}
        self.fc = make.kernel("fc", tapped, hidden, tensors("fc.weight"))
        self.layers: nnx.List[HeadLayer] = nnx.List([HeadLayer(block, head, partition, make)])
        self.norm = RMSNorm("norm", hidden, model.rms_norm_eps, tensors("model.norm.weight"), make)
        self._padded = padded_vocab_size(head.num_tokens, partition.devices)
        axes = {"vocabulary": self._padded, **hidden}
        padding = self._padded - head.num_tokens
        self.lm_head = make.table("lm_head", axes, tensors("lm_head.weight"), padding=padding)
        self.drafted = DraftVocabulary(head.num_tokens, partition, make) if head.has_tokens else None
        self.partition, self._num_tokens = partition, head.num_tokens
        make.require_all_rules_used()

    def shared(self, model: Decoder) -> list[nnx.Param[Weight]]:
        """The model's tables that it reads: the embedding, if it has none."""
        return [model.embedding] if self.embedding is None else []

    def features(self, hidden: Array, taps: Array) -> Array:  # noqa: ARG002 - as of an MTPHead
        """f[taps, ..., tapped] the inputs of some of the model's layers -> f[..., hidden]."""
        beside = jnp.moveaxis(taps, 0, -2)
        return linear(beside.reshape(*beside.shape[:-2], -1), self.fc, None, None)

    def __call__(
        self,
        token_ids: Array,
        positions: Array,  # noqa: ARG002 - as of an MTPHead
        features: Array,
        caches: Sequence[LayerCache],
        step: StepContext,
        shared: Sequence[nnx.Param[Weight]],
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids at i32[...] positions, and f[..., hidden] the features before them -> caches,
        f[..., hidden]. ``shared`` are the tables of that name."""
        table = shared[0] if self.embedding is None else self.embedding
        embedded = look_up(table, token_ids, None, self.partition.axis)
        (cache,) = caches
        cache, hidden = self.layers[0](embedded.astype(features.dtype), features, cache, step)
        return [cache], hidden

    def logits(self, hidden: Array, shared: Sequence[nnx.Param[Weight]]) -> Array:  # noqa: ARG002 - as of an MTPHead
        """f[rows, hidden] -> f32[rows, part] of the tokens that it drafts, on each device its part."""
        logits = table_logits(self.norm(hidden), self.lm_head.get_value(), None)
        return without_padding(logits, self._num_tokens, self._padded)

    def token_ids(self, numbers: Array) -> Array:
        """i32[rows] places among the tokens that it drafts -> i32[rows] tokens; below 0 as it is."""
        return numbers if self.drafted is None else self.drafted.token_ids(numbers)

    def over_vocabulary(self, logits: Array, hidden: Array) -> Array:  # noqa: ARG002 - as of an Assistant
        """``logits`` -> f32[rows, part of the vocabulary], of others those of no token."""
        return logits if self.drafted is None else self.drafted.over_vocabulary(logits)
