"""Mistral Small 4: DeepSeek's latents, queries that grow with their position, and experts chosen by a softmax."""

from dataclasses import replace

import msgspec

from engine.models.families.deepseek_v2 import LatentFields, latent_decoder_spec
from engine.models.families.glm4_moe import with_routed_experts
from engine.models.families.ministral3 import ROPE
from engine.models.family import Family, rope_reader
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.experts import or_one_by_one, stacked
from engine.models.requirements import require_one_of
from engine.models.rope_spec import RopeSpec
from engine.models.spec import ModelSpec

RULES = or_one_by_one(stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "mlp.experts.")


def mistral4(fields: LatentFields) -> ModelSpec:
    """Without rope parameters it has those of transformers."""
    own = {**ROPE, "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
    if not fields.rope_scaling and fields.rope_parameters is None:
        fields = msgspec.structs.replace(fields, rope_parameters=own)
    router = RouterSpec(
        normalised=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        groups=fields.n_group or 1,
        groups_per_token=fields.topk_group or 1,
    )
    return with_routed_experts(latent_decoder_spec(fields, _rope(fields)), fields, router, rules=RULES)


def _rope(fields: LatentFields) -> RopeSpec:
    """``partial_rotary_factor`` is of a whole head, and only repeats ``qk_rope_head_dim``."""
    rotated = fields.qk_rope_head_dim
    whole = msgspec.structs.replace(fields, head_dim=fields.qk_nope_head_dim + rotated)
    given = fields.rope_scaling or fields.rope_parameters or {}
    rope = rope_reader(whole, partial=True, scales_queries=True).read(given, fields.rope_theta or 10_000.0)
    require_one_of("partial_rotary_factor of a head, in dimensions,", rope.rotary_dim, (None, rotated))
    return replace(rope, rotary_dim=None)


FAMILY = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    mistral4,
    fields=LatentFields,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "first_k_dense_replace": 0,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
