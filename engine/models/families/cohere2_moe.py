"""Command A with experts: Cohere's blocks, whose feed-forwards are experts behind dense layers or none."""

from dataclasses import replace

import msgspec

from engine.models.families.cohere2 import CohereFields, cohere
from engine.models.families.glm4_moe import expert_rules
from engine.models.family import Family, sparse_layers, with_experts
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, Positive, require
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import BlockSpec, ModelSpec, Multipliers

SCORINGS = {"softmax": Scoring.SOFTMAX_OF_CHOSEN, "sigmoid": Scoring.SIGMOID}


class Cohere2MoeFields(CohereFields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 8
    num_experts_per_tok: Count = 2
    num_shared_experts: int = 0
    shared_expert_combination_strategy: str = "average"
    expert_selection_fn: str = "softmax"
    norm_topk_prob: bool = True
    mlp_layer_types: list[str] | None = None
    first_k_dense_replace: int = 0
    prefix_dense_intermediate_size: Count | None = None
    prefix_dense_sliding_window_pattern: Count = 1
    rms_norm_eps: Positive | None = None  # type: ignore[assignment]


def cohere2_moe(fields: Cohere2MoeFields) -> ModelSpec:
    """With ``rms_norm_eps`` norms do not subtract the mean."""
    dense, kinds = _dense_layers(fields), _layer_types(fields)
    eps, size = fields.rms_norm_eps, fields.intermediate_size
    require(
        not dense or fields.prefix_dense_intermediate_size is not None,
        "dense layers need prefix_dense_intermediate_size",
    )
    model = cohere(
        msgspec.structs.replace(
            fields,
            layer_types=kinds,
            layer_norm_eps=fields.layer_norm_eps if eps is None else eps,
            intermediate_size=fields.prefix_dense_intermediate_size or size,
        )
    )
    sparse = set(range(fields.num_hidden_layers)) - dense
    model = with_experts(model, _experts(fields), sparse)
    halved = fields.num_shared_experts > 0 and fields.shared_expert_combination_strategy == "average"

    def own(layer: int, block: BlockSpec) -> BlockSpec:
        mixer = self_attention(block)
        keeps_rope = mixer.scores.window or (layer in dense and fields.prefix_dense_sliding_window_pattern == 1)
        mixer = mixer if keeps_rope else replace(mixer, rope=NO_ROPE)
        multipliers = Multipliers(feed_forward_output=0.5) if halved and layer in sparse else block.multipliers
        return replace(block, mixer=mixer, multipliers=multipliers)

    blocks = tuple(own(layer, block) for layer, block in enumerate(model.blocks))
    model = replace(model, blocks=blocks, centered_norms=eps is None)
    return expert_rules(model, sparse) if fields.num_shared_experts else model


def _dense_layers(fields: Cohere2MoeFields) -> set[int]:
    """The layers without experts."""
    layers, types = fields.num_hidden_layers, fields.mlp_layer_types
    if types is None:
        return set(range(min(layers, fields.first_k_dense_replace)))
    return set(range(layers)) - set(sparse_layers(types, layers))


def _layer_types(fields: Cohere2MoeFields) -> list[str]:
    """``layer_types``; by default the first dense layers have a pattern of their own, and the others begin anew."""
    if fields.layer_types is not None:
        return fields.layer_types
    first = fields.first_k_dense_replace
    parts = (
        (first, fields.prefix_dense_sliding_window_pattern),
        (fields.num_hidden_layers - first, fields.sliding_window_pattern),
    )
    return [
        "sliding_attention" if number % pattern else "full_attention"
        for count, pattern in parts
        for number in range(1, count + 1)
    ]


def _experts(fields: Cohere2MoeFields) -> ExpertsSpec:
    size, activation, shared = fields.intermediate_size, fields.activation, fields.num_shared_experts
    return ExpertsSpec(
        size,
        fields.num_experts,
        fields.num_experts_per_tok,
        RouterSpec(SCORINGS[fields.expert_selection_fn], normalised=fields.norm_topk_prob),
        activation,
        shared=GatedSpec(size * shared, activation=activation) if shared else None,
    )


FAMILY = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    cohere2_moe,
    fields=Cohere2MoeFields,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False},
    supported={
        "rope_scaling": (None,),
        "expert_selection_fn": tuple(SCORINGS),
        "shared_expert_combination_strategy": ("average", "sum"),
    },
)
