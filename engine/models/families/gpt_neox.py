"""GPT-NeoX and Pythia: attention beside the feed-forward, each behind a norm of its own, and biases."""

from dataclasses import replace

import msgspec

from engine.models.families.stablelm import LayerNormFields
from engine.models.family import Family, decoder_spec, uniform_rope
from engine.models.layers.feed_forward import GatedSpec, plain_rules
from engine.models.requirements import Positive
from engine.models.rope_fields import Share
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import TensorRule, tensors

LAYER = "gpt_neox.layers.{layer}."
NORMS = {
    "attention_norm": f"{LAYER}input_layernorm",
    "mlp_norm": f"{LAYER}post_attention_layernorm",
    "norm": "gpt_neox.final_layer_norm",
}
UNUSED = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"


class GPTNeoXFields(LayerNormFields):
    """The family's own keys, with the defaults of transformers."""

    rotary_pct: Share = 0.25
    rotary_emb_base: Positive = 10_000.0
    use_parallel_residual: bool = True


def gpt_neox(fields: GPTNeoXFields) -> ModelSpec:
    """``rotary_pct`` and ``rotary_emb_base`` are for rope parameters without such."""
    fields = msgspec.structs.replace(
        fields,
        rms_norm_eps=fields.layer_norm_eps,
        rope_theta=fields.rotary_emb_base,
        partial_rotary_factor=fields.rotary_pct,
    )
    plain = GatedSpec(fields.intermediate_size, True, fields.activation, gated=False)
    ropes = [uniform_rope(fields, partial=True)] * fields.num_hidden_layers
    model = decoder_spec(fields, feed_forward=plain, ropes=ropes)
    parallel = fields.use_parallel_residual
    return replace(
        model,
        blocks=tuple(replace(block, is_parallel=parallel, parallel_norm=parallel) for block in model.blocks),
        centered_norms=True,
        norm_bias=True,
        tensors=tuple(_rules(has_bias=fields.attention_bias, has_head=not fields.tie_word_embeddings).items()),
        unused_tensors=UNUSED,
    )


def _rules(*, has_bias: bool, has_head: bool) -> dict[str, TensorRule]:
    """Queries, keys and values of a head are one after the other, as the kernel has them."""
    kinds = {"kernel": "weight", "bias": "bias"} if has_bias else {"kernel": "weight"}
    rules = {
        f"attention.{name}_{kind}": tensors(f"{LAYER}attention.{stored}.{suffix}")
        for name, stored in (("qkv", "query_key_value"), ("o", "dense"))
        for kind, suffix in kinds.items()
    }
    if has_head:
        rules["lm_head"] = replace(tensors("embed_out.weight"), otherwise=tensors("lm_head.weight"))
    return rules


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    gpt_neox,
    fields=GPTNeoXFields,
    defaults={"hidden_act": "gelu", "attention_bias": True, "eos_token_id": 2},
    fixed={
        "use_sliding_window": False,
        "layer_types": None,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    tensors={
        "embedding": tensors("gpt_neox.embed_in.weight"),
        **{f"{name}.scale": tensors(f"{stored}.weight") for name, stored in NORMS.items()},
        **{f"{name}.bias": tensors(f"{stored}.bias") for name, stored in NORMS.items()},
        **plain_rules("dense_h_to_4h", "dense_4h_to_h", bias=True, layer=LAYER),
    },
)
