"""InternLM 3: Llama, with keys of its own for the biases of queries, keys and values and for all others."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec
from engine.models.spec import ModelSpec


class InternLM3Fields(Fields):
    """The family's own keys; transformers writes ``attention_bias`` and ``mlp_bias`` in their place."""

    qkv_bias: bool = False
    bias: bool = False


def internlm3(fields: InternLM3Fields) -> ModelSpec:
    """``bias`` is of the output of attention and of the feed-forward, where Llama's ``attention_bias`` is of the output."""
    others = fields.bias or fields.mlp_bias
    return decoder_spec(msgspec.structs.replace(fields, mlp_bias=others), qkv_bias=fields.qkv_bias, output_bias=others)


FAMILY = Family(
    "internlm3",
    "InternLM3ForCausalLM",
    internlm3,
    fields=InternLM3Fields,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    fixed={"use_sliding_window": False, "layer_types": None},
    aliases=("LlamaForCausalLM",),
)
