"""A.X K1: DeepSeek-V3, but what experts give is normed."""

from dataclasses import replace

from engine.models.families.deepseek_v2 import LatentFields, latent_decoder_spec
from engine.models.families.glm4_moe import with_sigmoid_experts
from engine.models.family import Family, sparse_layers
from engine.models.requirements import Count
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, tensors

RULES = {
    "mlp_post_norm.scale": tensors(f"{LAYER}post_mlp_layernorm.weight"),
    # Published checkpoints have none, and choose by scores alone.
    "mlp.router.correction": replace(tensors(f"{LAYER}mlp.gate.e_score_correction_bias"), otherwise=tensors()),
}


class AXK1Fields(LatentFields):
    """The family's own keys, with the defaults of transformers."""

    q_lora_rank: Count = 1536
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: Count = 1


def axk1(fields: AXK1Fields) -> ModelSpec:
    """``mlp_layer_types`` goes before the other keys. Dense layers of checkpoints have a norm that is not used."""
    layers, types = range(fields.num_hidden_layers), fields.mlp_layer_types
    if types is None:
        first, step = fields.first_k_dense_replace, fields.moe_layer_freq
        sparse = [layer for layer in layers if layer >= first and layer % step == 0]
    else:
        sparse = sparse_layers(types, len(layers))
    model = with_sigmoid_experts(latent_decoder_spec(fields), fields, sparse, RULES)
    blocks = enumerate(model.blocks)
    dense = "|".join(str(layer) for layer in layers if layer not in sparse)
    return replace(
        model,
        blocks=tuple(
            replace(block, feed_forward_norms=NormPlan.BOTH) if layer in sparse else block for layer, block in blocks
        ),
        unused_tensors=rf"model\.layers\.({dense})\.post_mlp_layernorm\.weight" if dense else None,
    )


FAMILY = Family(
    "axk1",
    "AXK1ForCausalLM",
    axk1,
    fields=AXK1Fields,
    defaults={
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "max_position_embeddings": 32768,
        "n_routed_experts": 192,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 163691,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
    supported={"scoring_func": ("sigmoid", None)},
)
