"""Hunyuan with experts (A13B): the dense one's attention, experts of the highest probabilities and a shared one."""

from dataclasses import replace

from engine.models.families.hunyuan_v1_dense import FIXED, NORMS, hunyuan_v1_dense
from engine.models.family import Family, Fields
from engine.models.layers.experts import ExpertsSpec, gated
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count, require
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors


class HunyuanMoeFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 1
    moe_topk: Count | list[Count] = 1


def hunyuan_v1_moe(fields: HunyuanMoeFields) -> ModelSpec:
    """All layers have as many experts, and each may choose another number of them."""
    layers, size, chosen = fields.num_hidden_layers, fields.intermediate_size, fields.moe_topk
    each = chosen if isinstance(chosen, list) else [chosen] * layers
    require(len(each) >= layers, f"moe_topk has {len(each)} entries for {layers} layers")
    shared = GatedSpec(size, activation=fields.activation)
    model = hunyuan_v1_dense(fields)
    blocks = (
        replace(
            block,
            feed_forward=ExpertsSpec(size, fields.num_experts, count, activation=fields.activation, shared=shared),
        )
        for block, count in zip(model.blocks, each, strict=False)
    )
    return replace(model, blocks=tuple(blocks))


FAMILY = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    hunyuan_v1_moe,
    fields=HunyuanMoeFields,
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2},
    fixed=FIXED,
    supported={
        "use_cla": (False, None),
        "use_mla": (False, None),
        "use_qk_norm": (True, None),
        "norm_topk_prob": (True, None),
        "routed_scaling_factor": (1.0, None),
        "moe_layer_num_skipped": (0, None),
    },
    tensors={
        **NORMS,
        "mlp.router.kernel": tensors(f"{LAYER}mlp.gate.wg.weight"),
        **gated("mlp.shared", "mlp.shared_mlp"),
    },
)
