"""gpt-oss: attention sinks, every second layer slides, and experts with biases and clamped gates."""

import msgspec

from engine.models.family import Family, Fields, decoder_spec, layer_pattern, rope_reader
from engine.models.layers.activation import ClampedGate
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec, stacked
from engine.models.requirements import Count, Positive
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import LAYER, tensors

ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
MLP = f"{LAYER}mlp."


class GptOssFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0


def gpt_oss(fields: GptOssFields) -> ModelSpec:
    """Layers 0, 2, 4 ... slide, unless config.json lists the sliding layers."""
    given = fields.rope_scaling or fields.rope_parameters or ROPE
    rope = rope_reader(fields).read(given, fields.rope_theta or 150_000.0)
    experts = ExpertsSpec(
        fields.intermediate_size,
        fields.num_local_experts,
        fields.num_experts_per_tok,
        RouterSpec(Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        ClampedGate(fields.swiglu_alpha, fields.swiglu_limit),
        bias=True,
    )
    return decoder_spec(
        msgspec.structs.replace(fields, layer_types=layer_pattern(fields, 2)),
        feed_forward=experts,
        ropes=[rope] * fields.num_hidden_layers,
        sinks=True,
    )


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    gpt_oss,
    fields=GptOssFields,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
    },
    fixed={"use_sliding_window": True, "mlp_bias": False, "hidden_act": "silu"},
    tensors={
        "mlp.router.kernel": tensors(f"{MLP}router.weight"),
        "mlp.router.bias": tensors(f"{MLP}router.bias"),
        **stacked(
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            stored="experts hidden (ffn gate_up)",
            down_stored="experts ffn hidden",
        ),
        "mlp.experts.gate_up_bias": tensors(f"{MLP}experts.gate_up_proj_bias", stored="experts (ffn gate_up)"),
    },
)
