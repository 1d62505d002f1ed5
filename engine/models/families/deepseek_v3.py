"""DeepSeek-V3 and R1: latent attention, and experts chosen by sigmoids behind dense layers."""

from engine.models.families.deepseek_v2 import LatentFields, latent_decoder_spec
from engine.models.families.glm4_moe import with_further_layers, with_sigmoid_experts
from engine.models.family import Family
from engine.models.spec import ModelSpec


def deepseek_v3(fields: LatentFields) -> ModelSpec:
    """The ModelSpec of V3, whose first layers are dense."""
    model = with_sigmoid_experts(latent_decoder_spec(fields), fields)
    return with_further_layers(model, fields.num_nextn_predict_layers)


DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 1,
}
FIXED = {"use_sliding_window": False, "layer_types": None, "mlp_bias": False}
SUPPORTED = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)}
FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    deepseek_v3,
    fields=LatentFields,
    defaults=DEFAULTS,
    fixed=FIXED,
    supported=SUPPORTED,
)
