"""Solar Open: Llama's attention, and GLM-4.5's experts in all layers."""

from engine.models.families.glm4_moe import SigmoidMoeFields, with_sigmoid_experts
from engine.models.family import Family, decoder_spec
from engine.models.spec import ModelSpec


def solar_open(fields: SigmoidMoeFields) -> ModelSpec:
    """``attention_bias`` is of queries, keys and values alone."""
    return with_sigmoid_experts(decoder_spec(fields, output_bias=False), fields)


FAMILY = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    solar_open,
    fields=SigmoidMoeFields,
    defaults={
        "vocab_size": 196608,
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 1280,
    },
    fixed={
        "use_sliding_window": False,
        "layer_types": None,
        "mlp_bias": False,
        "intermediate_size": 1,
        "first_k_dense_replace": 0,
    },
)
