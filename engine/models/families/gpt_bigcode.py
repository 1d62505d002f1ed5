"""GPTBigCode, StarCoder and SantaCoder: GPT-2 with one head of keys and values, whose kernels are torch's."""

from dataclasses import replace

import msgspec

from engine.models.families.gpt2 import DEFAULTS, FIXED, LAYER, NAMES, SUPPORTED, TENSORS, GPTFields, gpt
from engine.models.family import Family
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import tensors


class GPTBigCodeFields(GPTFields):
    """The family's own key."""

    multi_query: bool = True


def gpt_bigcode(fields: GPTBigCodeFields) -> ModelSpec:
    """Without ``multi_query`` the queries, keys and values of a head are one after the other."""
    one = fields.multi_query
    model = gpt(msgspec.structs.replace(fields, num_key_value_heads=1 if one else None))
    names = {"kernel": f"{LAYER}attn.c_attn.weight", "bias": f"{LAYER}attn.c_attn.bias"}
    rules = {
        f"attention.qkv_{kind}": tensors(name, name, name, along="group") if one else tensors(name)
        for kind, name in names.items()
    }
    return replace(model, tensors=tuple(rules.items()))


FAMILY = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    gpt_bigcode,
    fields=GPTBigCodeFields,
    defaults={**DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    fixed=FIXED,
    supported=SUPPORTED,
    tensors=TENSORS,
    names=NAMES,
)
