"""DeepSeek-V2: latent attention, and experts chosen by a softmax, some groups of them a token."""

import math
from dataclasses import replace

import msgspec

from engine.models.families.glm4_moe import FurtherLayers, SigmoidMoeFields, with_routed_experts
from engine.models.family import Family, decoder_spec, uniform_rope
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.latent_attention import LatentAttentionSpec
from engine.models.requirements import Count, UnsupportedError, require_one_of
from engine.models.rope_spec import RopeSpec
from engine.models.spec import BlockSpec, ModelSpec


class LatentFields(SigmoidMoeFields):
    """The keys of latent attention, with DeepSeek's defaults of transformers."""

    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_interleave: bool = True
    num_nextn_predict_layers: FurtherLayers = 1


class DeepseekV2Fields(LatentFields):
    """The family's own keys."""

    num_experts_per_tok: Count | None = None  # type: ignore[assignment]
    topk_method: str = "greedy"


def latent_decoder_spec(fields: LatentFields, rope: RopeSpec | None = None) -> ModelSpec:
    """A decoder whose layers all have latent attention, and gated feed-forwards.

    ``attention_bias`` is of the projections to latents and of the last one. ``rope`` is by default
    that of config.json's parameters.
    """
    require_one_of("num_key_value_heads", fields.num_key_value_heads, (fields.num_attention_heads, None))
    fields = msgspec.structs.replace(fields, head_dim=fields.qk_rope_head_dim, num_key_value_heads=None)
    rope = replace(rope or uniform_rope(fields), interleaved=fields.rope_interleave)
    mixer = LatentAttentionSpec(
        fields.num_attention_heads,
        fields.kv_lora_rank,
        fields.qk_nope_head_dim,
        fields.qk_rope_head_dim,
        fields.v_head_dim,
        (fields.qk_nope_head_dim + fields.qk_rope_head_dim) ** -0.5 * _magnitude(fields, rope) ** 2,
        rope,
        fields.q_lora_rank,
        fields.attention_bias,
    )
    model = decoder_spec(fields, ropes=[rope] * fields.num_hidden_layers)

    def latent(block: BlockSpec) -> BlockSpec:
        return replace(block, mixer=mixer)

    return replace(model, blocks=tuple(map(latent, model.blocks)))


def _magnitude(fields: LatentFields, rope: RopeSpec) -> float:
    """YaRN's factor of queries, and of keys, by ``mscale_all_dim``."""
    given = fields.rope_scaling or fields.rope_parameters or {}
    share, factor = given.get("mscale_all_dim"), given.get("factor") or rope.factor
    if given.get("rope_type", given.get("type", "default")) == "default" or not share:
        return 1.0
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def deepseek_v2(fields: DeepseekV2Fields) -> ModelSpec:
    """``norm_topk_prob`` is not read by transformers' code of this family."""
    if fields.num_experts_per_tok is None:
        raise UnsupportedError("there is no num_experts_per_tok")
    in_groups = fields.topk_method == "group_limited_greedy"
    router = RouterSpec(
        normalised=False,
        scale=fields.routed_scaling_factor,
        groups=fields.n_group or 1 if in_groups else 1,
        groups_per_token=fields.topk_group or 1 if in_groups else 1,
        best_of_group=1,
    )
    return with_routed_experts(latent_decoder_spec(fields), fields, router)


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    deepseek_v2,
    fields=DeepseekV2Fields,
    defaults={
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "rope_interleave": True},
    supported={
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False, None),
        "moe_layer_freq": (1,),
    },
)
