"""The text model of Qwen3-VL: Qwen 3, as the three positions of its rope are one for a token of text."""

from functools import partial

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "qwen3_vl_text",
    "Qwen3VLForConditionalGeneration",
    partial(decoder_spec, qk_norm=True),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
        "head_dim": 128,
        "rope_theta": 500_000.0,
    },
    fixed={"use_sliding_window": False, "layer_types": None, "mlp_bias": False},
)
