"""What an assistant of Gemma 4 drafts behind each beginning of a text, by its module over whole rows, without pages."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from plain_attention import DenseAttention

from caching.attention.spec import AttentionInputs, AttentionSpec
from engine.models.decoder import Decoder
from engine.models.heads.assistant import Assistant
from engine.models.layers.cache_layout import cache_layout
from engine.models.layers.self_attention import self_attention
from engine.models.rope import rotations
from engine.models.step_context import LayerCache, Place, StepContext


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EarlierKeys:
    """A StepAttention over rows [1, length, heads, head_dim] whose queries see keys before their own positions alone."""

    fuses_rotation: ClassVar[bool] = False

    def __call__(
        self, spec: AttentionSpec, cache: LayerCache, place: Place, inputs: AttentionInputs
    ) -> tuple[LayerCache, Array]:
        """Each query sees the last ``window`` keys before its own."""
        assert spec == AttentionSpec(spec.scale, spec.window) and inputs.sinks is None
        of_group: Any = cache
        keys, values = (jnp.repeat(x, inputs.q.shape[2] // x.shape[2], axis=2) for x in of_group[place.group])
        positions = np.arange(inputs.q.shape[1])
        distance = positions[:, None] - positions
        seen = (distance > 0) & (distance <= (spec.window or len(positions)))
        scores = jnp.where(seen[None, None], jnp.einsum("bqhd,bkhd->bhqk", inputs.q, keys) * spec.scale, -1e30)
        return cache, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), values)


@nnx.jit
def chained(decoder: Decoder, assistant: Assistant, text: Array) -> Array:
    """f32[3, n, vocab] logits of three drafts behind the first 1, ..., n tokens of i32[n], of each the likeliest is fed."""
    positions = jnp.arange(len(text), dtype=jnp.int32)[None]
    step = StepContext(decoder.rotations(positions), DenseAttention(keeps=True))
    caches, hidden = decoder(text[None], [None] * decoder.partition.model.num_layers, step)
    layout, shared = cache_layout(decoder.partition.model.blocks), assistant.shared(decoder)
    places = []
    for block in assistant.partition.model.blocks:
        source = self_attention(block).kv_source
        assert source is not None
        place = layout.in_pages(source)
        places.append((layout.array(place, stacked=False), Place(place.group, None)))
    step, tokens, features = (
        StepContext(rotations(assistant.partition.model, positions), EarlierKeys()),
        text[None],
        jnp.roll(hidden, 1, axis=1),
    )
    found = []
    for _ in range(3):
        _, hidden, features = assistant(tokens, features, caches, places, step, shared)
        found.append(assistant.over_vocabulary(assistant.logits(hidden[0], shared), hidden[0]))
        tokens = jnp.argmax(found[-1], axis=-1)[None].astype(jnp.int32)
    return jnp.stack(found)
