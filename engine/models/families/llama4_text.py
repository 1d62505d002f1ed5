"""Llama 4: layers with rope see a chunk, the others all; one expert and a shared one, in all layers or in every few."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec

from engine.models.family import Family, Fields, check_types, decoder_spec, uniform_rope, with_experts
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, gated, or_one_by_one, stacked
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, require
from engine.models.rope_spec import NO_ROPE, RopeSpec
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.weights.parameters import LAYER, TensorRule, tensors

FULL, CHUNKED = "full_attention", "chunked_attention"
MOE = "feed_forward."


class Llama4Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    intermediate_size_mlp: Count = 16384
    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Annotated[int, msgspec.Meta(ge=0)] = 1
    """0 without experts."""
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    """For each layer 1 if it has rope, 0 if not."""
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = 8192
    attn_temperature_tuning: bool | int = True
    floor_scale: Count = 8192
    attn_scale: float = 0.1

    @property
    def roped(self) -> Sequence[int]:
        """For each layer whether it has rope."""
        layers, interval = self.num_hidden_layers, self.no_rope_layer_interval
        found = self.no_rope_layers or [(layer + 1) % interval for layer in range(layers)]
        require(len(found) >= layers, f"no_rope_layers has {len(found)} entries for {layers} layers")
        return found[:layers]

    @property
    def sparse(self) -> Collection[int]:
        """The layers with experts."""
        layers, step = range(self.num_hidden_layers), self.interleave_moe_layer_step
        given = layers[step - 1 :: step] if self.moe_layers is None and step else self.moe_layers or ()
        found = set(layers).intersection(given)
        for key in ("num_local_experts", "num_experts_per_tok"):
            require(not found or getattr(self, key) > 0, f"{key} must be at least 1: there are layers with experts")
        return found


def llama4(fields: Llama4Fields) -> ModelSpec:
    """Layers with rope see a chunk, if there are any, unless config.json lists the chunked layers."""
    layers, sparse, has_chunks = fields.num_hidden_layers, fields.sparse, fields.attention_chunk_size is not None
    types = fields.layer_types or [CHUNKED if rope and has_chunks else FULL for rope in fields.roped]
    check_types(types, (FULL, CHUNKED), layers)
    model = decoder_spec(
        msgspec.structs.replace(fields, layer_types=None, intermediate_size=fields.intermediate_size_mlp),
        ropes=_ropes(fields),
    )
    blocks = zip(model.blocks, types, strict=True)
    model = replace(model, blocks=tuple(_attending(fields, block, layer_type) for block, layer_type in blocks))
    if sparse:
        model = with_experts(model, _experts(fields), sparse)
    return replace(model, tensors=tuple(_rules(bool(sparse), len(sparse) < layers).items()))


def _ropes(fields: Llama4Fields) -> list[RopeSpec]:
    """Where there is none, queries grow with their position."""
    rope, without = replace(uniform_rope(fields), interleaved=True), NO_ROPE
    require(
        not fields.use_qk_norm or rope.attention_factor == 1,
        f"a rope that scales queries and keys by {rope.attention_factor} is not supported with use_qk_norm",
    )
    if fields.attn_temperature_tuning:
        scale, start = fields.attn_scale, 1
        without = replace(
            NO_ROPE, query_scale_beta=scale, original_max_position=fields.floor_scale, query_scale_start=start
        )
    return [rope if has_rope else without for has_rope in fields.roped]


def _attending(fields: Llama4Fields, block: BlockSpec, layer_type: str) -> BlockSpec:
    """The block with its chunk, and norms of queries and keys where it has rope."""
    mixer, chunk = self_attention(block), None
    if layer_type == CHUNKED:
        chunk = fields.attention_chunk_size  # Llama Guard 4 has none
    has_norm = fields.use_qk_norm and mixer.rope.rotary_dim != 0
    return replace(block, mixer=replace(mixer, scores=replace(mixer.scores, chunk=chunk), unit_qk_norm=has_norm))


def _experts(fields: Llama4Fields) -> ExpertsSpec:
    size, activation = fields.intermediate_size, fields.activation
    return ExpertsSpec(
        size,
        fields.num_local_experts,
        fields.num_experts_per_tok,
        RouterSpec(Scoring.SIGMOID, normalised=False, weighs_input=True),
        activation,
        shared=GatedSpec(size, activation=activation),
    )


def _rules(has_sparse: bool, has_dense: bool) -> dict[str, TensorRule]:
    rules = gated("mlp", "feed_forward") if has_dense else {}
    if has_sparse:
        rules["mlp.router.kernel"] = tensors(f"{LAYER}{MOE}router.weight")
        rules |= gated("mlp.shared", f"{MOE}shared_expert")
        together = stacked(
            f"{MOE}experts.gate_up_proj",
            f"{MOE}experts.down_proj",
            stored="experts hidden (gate_up ffn)",
            down_stored="experts ffn hidden",
        )
        rules |= or_one_by_one(together, f"{MOE}experts.")
    return rules


FAMILY = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    llama4,
    fields=Llama4Fields,
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "mlp_bias": False},
)
