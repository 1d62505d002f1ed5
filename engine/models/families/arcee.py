"""Arcee (AFM-4.5B): Llama with a feed-forward that has no gate."""

from engine.models.family import Family, Fields, decoder_spec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.spec import ModelSpec


def arcee(fields: Fields) -> ModelSpec:
    """The square of a ReLU, unless config.json says another activation."""
    plain = GatedSpec(fields.intermediate_size, fields.mlp_bias, fields.activation, gated=False)
    return decoder_spec(fields, feed_forward=plain)


FAMILY = Family(
    "arcee",
    "ArceeForCausalLM",
    arcee,
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "eos_token_id": 128001},
    fixed={"use_sliding_window": False, "layer_types": None},
)
