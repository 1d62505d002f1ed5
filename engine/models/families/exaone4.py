"""EXAONE 4: norms after attention and feed-forward; full layers beside windowed ones have no rope."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, layer_pattern, uniform_rope
from engine.models.requirements import UnsupportedError
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec, NormPlan


class Exaone4Fields(Fields):
    """The family's own key, with the default of transformers.

    Published configs, which list ``layer_types``, have a word like ``LLLG``.
    """

    sliding_window_pattern: int | str | None = 4


def hybrid_decoder(fields: Fields, period: int | str | None, norms: NormPlan) -> ModelSpec:
    """A decoder in which the last layer of a period sees all tokens; without a window all layers have rope."""
    if fields.layer_types is None and fields.sliding_window is not None:
        if not isinstance(period, int) or period < 1:
            raise UnsupportedError(f"sliding_window_pattern {period!r} needs layer_types")
        fields = msgspec.structs.replace(fields, layer_types=layer_pattern(fields, period))
    rope, types = uniform_rope(fields), fields.layer_types or ["full_attention"] * fields.num_hidden_layers
    ropes = [NO_ROPE if fields.sliding_window and kind == "full_attention" else rope for kind in types]
    return decoder_spec(fields, qk_norm=True, norms=norms, ropes=ropes)


def exaone4(fields: Exaone4Fields) -> ModelSpec:
    """Norms are behind attention and feed-forward."""
    return hybrid_decoder(fields, fields.sliding_window_pattern, NormPlan.AFTER)


DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "eos_token_id": 2}
FIXED = {"use_sliding_window": True, "max_window_layers": 1_000_000, "attention_bias": False, "mlp_bias": False}
FAMILY = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    exaone4,
    fields=Exaone4Fields,
    defaults=DEFAULTS,
    fixed=FIXED,
)
