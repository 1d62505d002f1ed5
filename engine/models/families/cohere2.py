"""Command R7B and Command A: attention beside the feed-forward; full layers have no rope."""

from dataclasses import replace

import msgspec

from engine.models.families.stablelm import LayerNormFields
from engine.models.family import Family, decoder_spec, layer_pattern, uniform_rope, with_attention
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, Positive
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import BlockSpec, ModelSpec


class CohereFields(LayerNormFields):
    """The family's own keys, with the defaults of transformers."""

    logit_scale: Positive = 0.0625
    sliding_window_pattern: Count = 4
    use_qk_norm: bool = False


def cohere(fields: CohereFields) -> ModelSpec:
    """All layers have rope, in neighbouring pairs."""
    rope = replace(uniform_rope(fields), interleaved=True)
    model = decoder_spec(
        msgspec.structs.replace(fields, rms_norm_eps=fields.layer_norm_eps),
        ropes=[rope] * fields.num_hidden_layers,
        logit_scale=fields.logit_scale,
        qk_norm=fields.use_qk_norm,
    )
    model = with_attention(model, norms_by_head=fields.use_qk_norm)
    blocks = tuple(replace(block, is_parallel=True) for block in model.blocks)
    return replace(model, blocks=blocks, centered_norms=True)


def cohere2(fields: CohereFields) -> ModelSpec:
    """Windowed layers have rope, the others none."""
    types = layer_pattern(fields, fields.sliding_window_pattern)
    model = cohere(msgspec.structs.replace(fields, layer_types=types))
    return replace(model, blocks=tuple(map(_without_rope_if_full, model.blocks)))


def _without_rope_if_full(block: BlockSpec) -> BlockSpec:
    mixer = self_attention(block)
    return block if mixer.scores.window else replace(block, mixer=replace(mixer, rope=NO_ROPE))


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    cohere2,
    fields=CohereFields,
    defaults={"tie_word_embeddings": True, "eos_token_id": 255001},
    fixed={"use_sliding_window": True, "mlp_bias": False, "head_dim": None, "use_qk_norm": False},
)
