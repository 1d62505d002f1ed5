"""GPT-2: learned positions instead of rope, LayerNorms, and kernels that are stored as [inputs, outputs]."""

from dataclasses import replace

import msgspec

from caching.attention.spec import AttentionSpec
from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.feed_forward import GatedSpec, plain_rules
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import tensors

BODY = "transformer."
LAYER = f"{BODY}h.{{layer}}."
UNUSED = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"
"""Masks of old checkpoints."""
NORMS = {"attention_norm": f"{LAYER}ln_1", "mlp_norm": f"{LAYER}ln_2", "norm": f"{BODY}ln_f"}
TENSORS = {
    "embedding": tensors(f"{BODY}wte.weight"),
    "position_table": tensors(f"{BODY}wpe.weight", stored="positions hidden"),
    **{f"{name}.scale": tensors(f"{stored}.weight") for name, stored in NORMS.items()},
    **{f"{name}.bias": tensors(f"{stored}.bias") for name, stored in NORMS.items()},
    **plain_rules("c_fc", "c_proj", bias=True, layer=LAYER),
    "attention.o_kernel": tensors(f"{LAYER}attn.c_proj.weight"),
    "attention.o_bias": tensors(f"{LAYER}attn.c_proj.bias"),
}
"""Those that GPTBigCode has as well."""
NAMES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS = {
    "vocab_size": 50_257,
    "max_position_embeddings": 1024,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 50_256,
}
FIXED = {
    "use_sliding_window": False,
    "layer_types": None,
    "head_dim": None,
    "attention_bias": True,
}
SUPPORTED = {"add_cross_attention": (False, None)}


class GPTFields(Fields, kw_only=True):
    """The keys of GPT-2 and of what came of it, with the defaults of transformers."""

    intermediate_size: Count = 0
    """0 is four times ``hidden_size``."""
    scale_attn_weights: bool = True


class GPT2Fields(GPTFields):
    """GPT-2's own key."""

    scale_attn_by_inverse_layer_idx: bool = False


def gpt(fields: GPTFields) -> ModelSpec:
    """A decoder with positions as a table, and biases in all products and norms."""
    fields = msgspec.structs.replace(fields, intermediate_size=fields.intermediate_size or 4 * fields.hidden_size)
    plain = GatedSpec(fields.intermediate_size, True, fields.activation, gated=False)
    scale, ropes = None if fields.scale_attn_weights else 1.0, [NO_ROPE] * fields.num_hidden_layers
    model = decoder_spec(fields, attention_scale=scale, feed_forward=plain, ropes=ropes)
    return replace(
        model, centered_norms=True, norm_bias=True, position_offset=0, base_prefix=BODY, unused_tensors=UNUSED
    )


def gpt2(fields: GPT2Fields) -> ModelSpec:
    """Scores of a layer may be divided by its number, the first being 1."""
    model = gpt(fields)
    if not fields.scale_attn_by_inverse_layer_idx:
        return model
    mixers = [self_attention(block) for block in model.blocks]
    scales = [mixer.scores.scale / layer for layer, mixer in enumerate(mixers, 1)]
    mixers = [replace(mixer, scores=AttentionSpec(scale)) for mixer, scale in zip(mixers, scales, strict=True)]
    blocks = zip(model.blocks, mixers, strict=True)
    return replace(model, blocks=tuple(replace(block, mixer=mixer) for block, mixer in blocks))


STORED = {
    "attention.o_kernel": "heads hidden",
    "mlp.gate_up_kernel": "hidden (gate_up ffn)",
    "mlp.down_kernel": "ffn hidden",
}
FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    gpt2,
    fields=GPT2Fields,
    defaults={**DEFAULTS, "hidden_act": "gelu_new"},
    fixed={**FIXED, "num_key_value_heads": None},
    supported=SUPPORTED,
    tensors={
        **TENSORS,
        **{name: replace(TENSORS[name], stored=stored) for name, stored in STORED.items()},
        "attention.qkv_kernel": tensors(
            *[f"{LAYER}attn.c_attn.weight"] * 3, along="group", stored="hidden (kv_heads group head_dim)"
        ),
        "attention.qkv_bias": tensors(*[f"{LAYER}attn.c_attn.bias"] * 3, along="group"),
    },
    names=NAMES,
)
