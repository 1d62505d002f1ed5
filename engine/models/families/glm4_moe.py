"""GLM-4.5 to 4.7: experts chosen by sigmoids and shared ones, behind a dense layer or some."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated

import msgspec

from engine.models.family import Family, Fields, decoder_spec, uniform_rope, with_experts
from engine.models.head_specs import MTPHeadSpec
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, gated
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import TensorRule

NO_RULES: Mapping[str, TensorRule] = MappingProxyType({})
FURTHER = "layers that predict further tokens"
FurtherLayers = Annotated[int, msgspec.Meta(ge=0, le=4096)]
"""How many of them a checkpoint has."""


class SigmoidMoeFields(Fields):
    """The keys of a router like DeepSeek-V3's, with GLM's defaults of transformers."""

    n_routed_experts: Count = 128
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1408
    first_k_dense_replace: int = 1
    n_group: Count | None = 1
    topk_group: Count | None = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0


class Glm4MoeFields(SigmoidMoeFields):
    """The family's own keys."""

    use_qk_norm: bool = False
    num_nextn_predict_layers: FurtherLayers = 1


def sigmoid_router(fields: SigmoidMoeFields) -> RouterSpec:
    """DeepSeek-V3's."""
    return RouterSpec(
        Scoring.SIGMOID,
        normalised=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        groups=fields.n_group or 1,
        groups_per_token=fields.topk_group or 1,
        correction=True,
    )


def with_sigmoid_experts(
    model: ModelSpec,
    fields: SigmoidMoeFields,
    sparse: Collection[int] | None = None,
    rules: Mapping[str, TensorRule] = NO_RULES,
) -> ModelSpec:
    """The model with experts and shared ones in some layers, by default behind the first.

    ``rules`` are those of its routers' tensors, if they have other names than GLM's.
    """
    return with_routed_experts(model, fields, sigmoid_router(fields), sparse, rules)


def with_routed_experts(
    model: ModelSpec,
    fields: SigmoidMoeFields,
    router: RouterSpec,
    sparse: Collection[int] | None = None,
    rules: Mapping[str, TensorRule] = NO_RULES,
) -> ModelSpec:
    """``with_sigmoid_experts`` with another router."""
    size, activation = fields.moe_intermediate_size, fields.activation
    shared = GatedSpec(size * fields.n_shared_experts, activation=activation)
    experts = ExpertsSpec(size, fields.n_routed_experts, fields.num_experts_per_tok, router, activation, shared=shared)
    if sparse is None:
        sparse = range(max(0, fields.first_k_dense_replace), fields.num_hidden_layers)
    return expert_rules(with_experts(model, experts, sparse), sparse, rules)


def expert_rules(model: ModelSpec, sparse: Collection[int], rules: Mapping[str, TensorRule] = NO_RULES) -> ModelSpec:
    """The model with the rules of its shared experts' tensors, and others of the layers with experts."""
    every = {**gated("mlp.shared", "mlp.shared_experts"), **rules} if sparse else {}
    return replace(model, tensors=tuple(every.items()))


def with_further_layers(model: ModelSpec, count: int) -> ModelSpec:
    """The model of a checkpoint in which so many layers behind the last predict further tokens."""
    numbers = range(model.num_layers, model.num_layers + count)
    heads = tuple(MTPHeadSpec(f"model.layers.{number}.") for number in numbers)
    return replace(model, unserved=tuple((head.prefix, FURTHER) for head in heads), further_layers=heads)


def glm4_moe(fields: Glm4MoeFields) -> ModelSpec:
    """``attention_bias`` is of queries, keys and values alone."""
    ropes = [uniform_rope(fields, partial=True)] * fields.num_hidden_layers
    model = decoder_spec(fields, output_bias=False, qk_norm=fields.use_qk_norm, ropes=ropes)
    return with_further_layers(with_sigmoid_experts(model, fields), fields.num_nextn_predict_layers)


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    glm4_moe,
    fields=Glm4MoeFields,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
