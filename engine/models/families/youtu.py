"""Youtu-LLM: DeepSeek's latent attention, and dense feed-forwards."""

from engine.models.families.deepseek_v2 import LatentFields, latent_decoder_spec
from engine.models.family import Family

FAMILY = Family(
    "youtu",
    "YoutuForCausalLM",
    latent_decoder_spec,
    fields=LatentFields,
    defaults={"num_key_value_heads": 16, "tie_word_embeddings": True, "eos_token_id": 128001},
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
