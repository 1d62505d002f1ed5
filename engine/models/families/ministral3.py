"""Ministral 3: Mistral with yarn, and queries that grow with their position as in Llama 4."""

from engine.models.family import Family, Fields, decoder_spec, rope_reader
from engine.models.spec import ModelSpec

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(fields: Fields) -> ModelSpec:
    """Without rope parameters it has those of transformers."""
    given = fields.rope_scaling or fields.rope_parameters or ROPE
    rope = rope_reader(fields, scales_queries=True).read(given, fields.rope_theta or 10_000.0)
    return decoder_spec(fields, ropes=[rope] * fields.num_hidden_layers)


FAMILY = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    ministral3,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "eos_token_id": 2,
    },
    fixed={
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
