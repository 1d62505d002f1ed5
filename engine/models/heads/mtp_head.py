"""A layer that predicts further tokens (DeepSeek-V3 2024, multi-token prediction), as a draft head.

For the token at a position it reads the token itself, and a *feature* of the position before: the
model's hidden state behind its last norm, or where that is a draft itself, the head's own hidden
state. Both are normed and joined by one product, and go through a layer of the model's kind. The
embedding and the head are the model's.

The arithmetic is that of vLLM 0.11 (vllm/model_executor/models/deepseek_mtp.py, glm4_moe_mtp.py,
qwen3_next_mtp.py), which counts each position one less, and at the first of them reads zeros for the
token, but in Qwen's. The token at position 0 has none before it, and no other sees it
(``AttentionSpec.first``). Of a draft Qwen's layer reads its hidden state behind its norm.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from engine.models.decoder import Decoder
from engine.models.decoder import logits as to_logits
from engine.models.decoder_layer import DecoderLayer
from engine.models.head_specs import MTPHeadSpec
from engine.models.heads.mtp_layer import NORMS
from engine.models.layers.norm import RMSNorm
from engine.models.linear import linear, look_up
from engine.models.partition import Partition
from engine.models.step_context import LayerCache, Place, StepContext
from engine.models.weights.factory import ParameterFactory
from engine.models.weights.forms import Weight
from engine.models.weights.parameters import tensors


class MTPHead(nnx.Module):
    """Tokens and features to hidden states, which are the next tokens' features, and these to
    logits of all tokens."""

    def __init__(self, partition: Partition) -> None:
        model = partition.model
        (block,) = model.blocks
        make = ParameterFactory(None, partition.devices, model.num_layers, dict(model.tensors))
        hidden = {"hidden": model.hidden_size}

        def norm(name: str) -> RMSNorm:
            rule = tensors(f"model.layers.0.{NORMS[name]}.weight")
            return RMSNorm(name, hidden, model.rms_norm_eps, rule, make, centered=model.centered_norms)

        self.embedding_norm, self.feature_norm = norm("embedding_norm"), norm("feature_norm")
        joined = {"columns": 2 * model.hidden_size}
        self.joint = make.kernel("joint", joined, hidden, tensors("model.layers.0.eh_proj.weight"))
        self.layers: nnx.List[DecoderLayer] = nnx.List([DecoderLayer(block, partition, make)])
        self.norm = norm("norm")
        assert isinstance(model.head, MTPHeadSpec)
        self.partition, self.spec = partition, model.head

    def shared(self, model: Decoder) -> list[nnx.Param[Weight]]:
        """The model's tables that it reads: the embedding, and that of logits."""
        return [model.embedding, model.embedding if model.lm_head is None else model.lm_head]

    def features(self, hidden: Array, taps: Array) -> Array:  # noqa: ARG002 - as of an EagleHead
        """f[..., hidden] the model's hidden states, as they are."""
        return hidden

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        features: Array,
        caches: Sequence[LayerCache],
        step: StepContext,
        shared: Sequence[nnx.Param[Weight]],
    ) -> tuple[list[LayerCache], Array]:
        """i32[...] ids at i32[...] positions, and f[..., hidden] the features before them -> caches,
        f[..., hidden]. ``shared`` are the tables of that name."""
        embedded = look_up(shared[0], token_ids, None, self.partition.axis).astype(features.dtype)
        if not self.spec.reads_first:
            embedded = jnp.where((positions == 1)[..., None], np.array(0, features.dtype), embedded)
        joined = jnp.concatenate([self.embedding_norm(embedded), self.feature_norm(features)], axis=-1)
        places = [(0, Place(0, None))]
        written, hidden = self.layers[0](linear(joined, self.joint, None, None), caches, places, step)
        return written, self.norm(hidden) if self.spec.chains_normed else hidden

    def logits(self, hidden: Array, shared: Sequence[nnx.Param[Weight]]) -> Array:
        """f[rows, hidden] -> f32[rows, part of the vocabulary]."""
        normed = hidden if self.spec.chains_normed else self.norm(hidden)
        return to_logits(normed, shared[1].get_value(), self.partition)

    def token_ids(self, numbers: Array) -> Array:
        """i32[rows] tokens, which are what it drafts."""
        return numbers

    def over_vocabulary(self, logits: Array, hidden: Array) -> Array:  # noqa: ARG002 - as of an Assistant
        """``logits``, which have all tokens."""
        return logits
