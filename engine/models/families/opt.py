"""OPT: learned positions from the third row of their table on, LayerNorms, and a feed-forward without a gate."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count, require
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import TensorRule, tensors

BODY = "model."
DECODER = f"{BODY}decoder."
LAYER = f"{DECODER}layers.{{layer}}."
NORMS = {
    "attention_norm": f"{LAYER}self_attn_layer_norm",
    "mlp_norm": f"{LAYER}final_layer_norm",
    "norm": f"{DECODER}final_layer_norm",
}
OFFSET = 2
"""The rows of the table before that of the first position."""


class OPTFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    word_embed_proj_dim: Count | None = None
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True


def opt(fields: OPTFields) -> ModelSpec:
    """``enable_bias`` is of all products but the head. Raises UnsupportedError for embeddings of another size."""
    embedded, hidden = fields.word_embed_proj_dim or fields.hidden_size, fields.hidden_size
    require(
        embedded == hidden,
        f"word_embed_proj_dim {embedded} beside hidden_size {hidden}, as OPT-350M has it, is not supported",
    )
    bias, affine = fields.enable_bias, fields.layer_norm_elementwise_affine
    fields = msgspec.structs.replace(fields, attention_bias=bias)
    plain = GatedSpec(fields.intermediate_size, bias, fields.activation, gated=False)
    model = decoder_spec(fields, feed_forward=plain, ropes=[NO_ROPE] * fields.num_hidden_layers)
    return replace(
        model,
        centered_norms=True,
        norm_scales=affine,
        norm_bias=affine,
        position_offset=OFFSET,
        base_prefix=BODY,
        tensors=tuple(_rules(has_bias=bias, has_scales=affine).items()),
    )


def _rules(*, has_bias: bool, has_scales: bool) -> dict[str, TensorRule]:
    kinds = {"kernel": "weight", "bias": "bias"} if has_bias else {"kernel": "weight"}
    products = {"attention.o": "self_attn.out_proj", "mlp.gate_up": "fc1", "mlp.down": "fc2"}
    rules = {
        f"{name}_{kind}": tensors(f"{LAYER}{stored}.{suffix}")
        for name, stored in products.items()
        for kind, suffix in kinds.items()
    }
    for kind, suffix in kinds.items():
        rules[f"attention.qkv_{kind}"] = tensors(
            *(f"{LAYER}self_attn.{part}_proj.{suffix}" for part in "qkv"), along="group"
        )
    if has_scales:
        rules |= {f"{name}.scale": tensors(f"{stored}.weight") for name, stored in NORMS.items()}
        rules |= {f"{name}.bias": tensors(f"{stored}.bias") for name, stored in NORMS.items()}
    return rules


FAMILY = Family(
    "opt",
    "OPTForCausalLM",
    opt,
    fields=OPTFields,
    defaults={
        "vocab_size": 50_272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    fixed={
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
        "layer_types": None,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    supported={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False, None)},
    tensors={
        "embedding": tensors(f"{DECODER}embed_tokens.weight"),
        "position_table": tensors(f"{DECODER}embed_positions.weight", stored="positions hidden"),
    },
    names={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
)
