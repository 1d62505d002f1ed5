"""LFM2: gated short convolutions with some layers of attention."""

from collections.abc import Sequence

import msgspec

from engine.models.family import Family, Fields, check_types, decoder_spec, uniform_rope, with_mixers
from engine.models.layers.short_convolution import ShortConvolutionSpec
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

TYPES = ("conv", "full_attention")
FEED_FORWARD = f"{LAYER}feed_forward."
TENSORS = {
    "norm.scale": tensors("model.embedding_norm.weight"),
    "attention_norm.scale": tensors(f"{LAYER}operator_norm.weight"),
    "mlp_norm.scale": tensors(f"{LAYER}ffn_norm.weight"),
}
ATTENTION_TENSORS = {
    "attention.q_norm.scale": tensors(f"{LAYER}self_attn.q_layernorm.weight"),
    "attention.k_norm.scale": tensors(f"{LAYER}self_attn.k_layernorm.weight"),
    "attention.o_kernel": tensors(f"{LAYER}self_attn.out_proj.weight"),
}
DENSE_TENSORS = {
    "mlp.gate_up_kernel": tensors(f"{FEED_FORWARD}w1.weight", f"{FEED_FORWARD}w3.weight", along="gate_up"),
    "mlp.down_kernel": tensors(f"{FEED_FORWARD}w2.weight"),
}
DEFAULTS = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
FIXED = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False, "mlp_bias": False}


class ShortConvolutionFields(Fields):
    """The keys of layers with a convolution, with the defaults of transformers."""

    norm_eps: Positive = 1e-5
    taps: Count = msgspec.field(default=3, name="conv_L_cache")
    conv_bias: bool = False

    @property
    def convolution(self) -> ShortConvolutionSpec:
        """Their mixer. Raises UnsupportedError."""
        return ShortConvolutionSpec(self.hidden_size, self.taps, self.conv_bias)


class TiedFields(ShortConvolutionFields):
    """Those of LFM2, dense and with experts."""

    tie_embedding: bool | None = None
    """An older name of ``tie_word_embeddings``, which goes before it."""


class Lfm2Fields(TiedFields):
    """The family's own keys."""

    block_ff_dim: Count | None = None
    """An older name of ``intermediate_size``, which goes before it."""
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_multiple_of: Count = 256
    full_attn_idxs: list[int] | None = None

    @property
    def columns(self) -> int:
        """Those of the feed-forward: two thirds of what config.json has, rounded up, unless told otherwise."""
        given = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return given
        adjusted, step = int(2 * given / 3), self.block_multiple_of
        if self.block_ffn_dim_multiplier is None:
            return adjusted
        return step * -(-int(self.block_ffn_dim_multiplier * adjusted) // step)

    @property
    def types(self) -> list[str]:
        """``layer_types``; by default all layers have attention."""
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        full = layers if self.full_attn_idxs is None else self.full_attn_idxs
        return ["full_attention" if layer in full else "conv" for layer in layers]


def convolution_layers(types: Sequence[str]) -> list[int]:
    """The layers of that type."""
    return [layer for layer, kind in enumerate(types) if kind == "conv"]


def convolution_model(fields: TiedFields, types: Sequence[str], columns: int) -> ModelSpec:
    """Attention with norms of queries and keys, convolutions in the layers of that type."""
    layers = fields.num_hidden_layers
    check_types(types, TYPES, layers)
    tied = fields.tie_word_embeddings if fields.tie_embedding is None else fields.tie_embedding
    plain = msgspec.structs.replace(
        fields, layer_types=None, intermediate_size=columns, rms_norm_eps=fields.norm_eps, tie_word_embeddings=tied
    )
    model = decoder_spec(plain, qk_norm=True, ropes=[uniform_rope(plain)] * layers)
    return with_mixers(model, fields.convolution, convolution_layers(types))


def lfm2(fields: Lfm2Fields) -> ModelSpec:
    """All layers have the same feed-forward."""
    return convolution_model(fields, fields.types, fields.columns)


FAMILY = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    lfm2,
    fields=Lfm2Fields,
    defaults={**DEFAULTS, "hidden_size": 2560, "intermediate_size": 12288},
    fixed=FIXED,
    tensors=TENSORS | ATTENTION_TENSORS | DENSE_TENSORS,
)
