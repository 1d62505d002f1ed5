"""StarCoder2: norms subtract the mean and have biases, as all products have; a feed-forward without a gate."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.feed_forward import GatedSpec, plain_rules
from engine.models.requirements import Positive
from engine.models.spec import ModelSpec


class Starcoder2Fields(Fields):
    """The family's own keys, with the defaults of transformers."""

    norm_epsilon: Positive = 1e-5
    use_bias: bool = True


def starcoder2(fields: Starcoder2Fields) -> ModelSpec:
    """``use_bias`` is of all products but the head."""
    bias = fields.use_bias
    fields = msgspec.structs.replace(fields, attention_bias=bias, rms_norm_eps=fields.norm_epsilon)
    plain = GatedSpec(fields.intermediate_size, bias, fields.activation, gated=False)
    rules = plain_rules("c_fc", "c_proj", bias=bias)
    model = decoder_spec(fields, feed_forward=plain)
    return replace(model, centered_norms=True, norm_bias=True, tensors=tuple(rules.items()))


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    starcoder2,
    fields=Starcoder2Fields,
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "eos_token_id": 50256,
    },
    fixed={"use_sliding_window": True, "max_window_layers": 0, "layer_types": None},
)
