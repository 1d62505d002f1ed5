"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, in the layers that config.json lists."""

from engine.models.families.deepseek_v2 import LatentFields, latent_decoder_spec
from engine.models.families.deepseek_v3 import FIXED, SUPPORTED
from engine.models.families.glm4_moe import with_further_layers, with_sigmoid_experts
from engine.models.family import Family, sparse_layers
from engine.models.spec import ModelSpec


class Glm4MoeLiteFields(LatentFields):
    """The family's own keys."""

    mlp_layer_types: list[str] | None = None


def glm4_moe_lite(fields: Glm4MoeLiteFields) -> ModelSpec:
    """By default the first layer alone is dense."""
    layers = fields.num_hidden_layers
    types = fields.mlp_layer_types or ["dense", *["sparse"] * (layers - 1)]
    model = with_sigmoid_experts(latent_decoder_spec(fields), fields, sparse_layers(types, layers))
    return with_further_layers(model, fields.num_nextn_predict_layers)


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    glm4_moe_lite,
    fields=Glm4MoeLiteFields,
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "eos_token_id": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    fixed=FIXED,
    supported=SUPPORTED | {"first_k_dense_replace": (1,)},
)
