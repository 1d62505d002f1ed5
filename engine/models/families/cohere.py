"""Command R: attention beside the feed-forward."""

from engine.models.families.cohere2 import CohereFields, cohere
from engine.models.family import Family

FAMILY = Family(
    "cohere",
    "CohereForCausalLM",
    cohere,
    fields=CohereFields,
    defaults={"rope_theta": 500_000.0, "tie_word_embeddings": True, "eos_token_id": 255001},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
