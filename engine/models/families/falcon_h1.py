"""Falcon-H1: in each layer attention and Mamba-2 side by side, and multipliers of nearly all that is computed."""

from dataclasses import replace

from engine.models.families.bamba import BIASES, TENSORS
from engine.models.families.granitemoehybrid import GraniteHybridFields
from engine.models.family import Family, decoder_spec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.mamba2 import GatedNorm, Mamba2Spec
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec, Multipliers


class FalconH1Fields(GraniteHybridFields):
    """The family's own keys, with the defaults of transformers; the others, of Mamba-2, are Granite's."""

    mamba_d_ssm: Count | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    lm_head_multiplier: Positive = 1.0
    key_multiplier: Positive = 1.0
    attention_in_multiplier: Positive = 1.0
    attention_out_multiplier: Positive = 1.0
    ssm_in_multiplier: Positive = 1.0
    ssm_out_multiplier: Positive = 1.0
    mlp_multipliers: tuple[Positive, Positive] = (1.0, 1.0)
    ssm_multipliers: tuple[Positive, Positive, Positive, Positive, Positive] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def mamba_width(self) -> int:
        """See GraniteHybridFields."""
        return super().mamba_width if self.mamba_d_ssm is None else self.mamba_d_ssm

    @property
    def mamba(self) -> Mamba2Spec:
        """See GraniteHybridFields. Raises UnsupportedError."""
        norm = GatedNorm.BEFORE if self.mamba_norm_before_gate else GatedNorm.BEHIND
        return replace(
            super().mamba,
            output_bias=self.projectors_bias,
            norm=norm if self.mamba_rms_norm else GatedNorm.NONE,
            scales=() if set(self.ssm_multipliers) == {1.0} else self.ssm_multipliers,
        )


def falcon_h1(fields: FalconH1Fields) -> ModelSpec:
    """Scores are multiplied by what transformers multiplies keys by."""
    gate, down = fields.mlp_multipliers
    model = decoder_spec(
        fields,
        attention_scale=fields.size_of_head**-0.5 * fields.key_multiplier,
        feed_forward=GatedSpec(fields.intermediate_size, fields.mlp_bias, fields.activation, gate_scale=gate),
        embedding_multiplier=fields.embedding_multiplier,
        logit_scale=fields.lm_head_multiplier,
    )
    multipliers = Multipliers(
        mixer_input=fields.attention_in_multiplier,
        mixer_output=fields.attention_out_multiplier,
        beside_input=fields.ssm_in_multiplier,
        beside_output=fields.ssm_out_multiplier,
        feed_forward_output=down,
    )
    mamba = fields.mamba
    blocks = tuple(replace(block, beside=mamba, multipliers=multipliers) for block in model.blocks)
    return replace(model, blocks=blocks, tensors=tuple(BIASES.items()) if fields.mlp_bias else ())


FAMILY = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    falcon_h1,
    fields=FalconH1Fields,
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "layer_types": None},
    tensors=TENSORS,
)
