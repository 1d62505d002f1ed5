"""IQuest-Coder: Llama with defaults of its own, which transformers writes as its architecture."""

from engine.models.family import Family, decoder_spec

FAMILY = Family(
    "iquestcoder",
    "IQuestCoderForCausalLM",
    decoder_spec,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    fixed={"layer_types": None},
    supported={"clip_qkv": (None,), "use_sliding_window": (False, None)},
    aliases=("LlamaForCausalLM",),
)
