"""Nemotron-H: layers of one part each: Mamba-2, attention without rope, a plain feed-forward or experts."""

from dataclasses import replace
from typing import Annotated

import msgspec

from engine.models.families.glm4_moe import FURTHER, SigmoidMoeFields
from engine.models.family import FULL, LINEAR, Family, decoder_spec
from engine.models.layers.activation import ACTIVATIONS, Activation
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import DOWN, GATE_UP, ExpertsSpec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.mamba2 import Mamba2Spec
from engine.models.requirements import Count, Positive, require, require_one_of
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.weights.parameters import TensorRule, tensors

LAYER = "backbone.layers.{layer}."
MIXER = f"{LAYER}mixer."
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of ``hybrid_override_pattern``."""
TENSORS = {
    "embedding": tensors("backbone.embeddings.weight"),
    "norm.scale": tensors("backbone.norm_f.weight"),
    "attention_norm.scale": tensors(f"{LAYER}norm.weight"),
    "attention.qkv_kernel": tensors(*(f"{MIXER}{name}_proj.weight" for name in "qkv"), along="group"),
    "attention.o_kernel": tensors(f"{MIXER}o_proj.weight"),
}


class NemotronHFields(SigmoidMoeFields):
    """The family's own keys, with the defaults of transformers."""

    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    layer_norm_epsilon: Positive = 1e-5
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    ssm_state_size: Count = 128
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    n_groups: Count = 8
    conv_kernel: Count = 4
    time_step_min: Annotated[float, msgspec.Meta(ge=0)] = 0.001
    use_conv_bias: bool = True
    use_bias: bool = False
    moe_shared_expert_intermediate_size: Count = 7688

    @property
    def types(self) -> list[str]:
        """What each layer is. Raises UnsupportedError."""
        given = self.layers_block_type
        if given is None:
            pattern = self.hybrid_override_pattern or "ME*-"
            for letter in pattern:
                require_one_of("hybrid_override_pattern", letter, tuple(LETTERS))
            given = [LETTERS[letter] for letter in pattern]
        for layer_type in given:
            require_one_of("layers_block_type", layer_type, (*LINEAR, *FULL, "mlp", "moe"))
        return given

    @property
    def feed_forward_activation(self) -> Activation:
        """That of all feed-forwards. Raises UnsupportedError."""
        return _activation("mlp_hidden_act", self.mlp_hidden_act)

    @property
    def mamba(self) -> Mamba2Spec:
        """The mixer of linear layers. Times have no upper limit. Raises UnsupportedError."""
        heads, groups = self.mamba_num_heads, self.n_groups
        require(heads % groups == 0, f"n_groups {groups} does not divide mamba_num_heads {heads}")
        require(self.conv_kernel > 1, "conv_kernel 1 is not supported")
        return Mamba2Spec(
            heads,
            self.mamba_head_dim,
            groups,
            self.ssm_state_size,
            self.conv_kernel,
            self.use_conv_bias,
            self.use_bias,
            self.use_bias,
            self.time_step_min,
            prefix=MIXER,
            activation=_activation("mamba_hidden_act", self.mamba_hidden_act),
        )

    @property
    def moe(self) -> ExpertsSpec:
        """The experts of all layers that have some. Raises UnsupportedError."""
        activation = self.feed_forward_activation
        router = RouterSpec(
            Scoring.SIGMOID,
            self.norm_topk_prob,
            self.routed_scaling_factor,
            self.n_group or 1,
            self.topk_group or 1,
            correction=True,
        )
        return ExpertsSpec(
            self.moe_intermediate_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            router,
            activation,
            gated=False,
            shared=GatedSpec(self.moe_shared_expert_intermediate_size, self.mlp_bias, activation, gated=False),
        )


def _activation(key: str, name: str) -> Activation:
    require_one_of(key, name, tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


def nemotron_h(fields: NemotronHFields) -> ModelSpec:
    """A layer has a norm and one part. ``num_hidden_layers`` is not read."""
    types = fields.types
    require(any(layer_type in FULL for layer_type in types), "a model without any layer of attention is not supported")
    plain = msgspec.structs.replace(
        fields, num_hidden_layers=len(types), layer_types=None, rms_norm_eps=fields.layer_norm_epsilon
    )
    model = decoder_spec(plain, ropes=[NO_ROPE] * len(types))
    blocks = tuple(_block(fields, block, layer_type) for block, layer_type in zip(model.blocks, types, strict=True))
    rules = _rules(types, has_bias=fields.mlp_bias)
    return replace(model, blocks=blocks, tensors=tuple(rules.items()), unserved=(("mtp.", FURTHER),))


def _block(fields: NemotronHFields, attention: BlockSpec, layer_type: str) -> BlockSpec:
    if layer_type in FULL:
        return replace(attention, feed_forward=None)
    if layer_type in LINEAR:
        return BlockSpec(fields.mamba, None)
    activation = fields.feed_forward_activation
    dense = GatedSpec(fields.intermediate_size, fields.mlp_bias, activation, gated=False)
    return BlockSpec(None, fields.moe if layer_type == "moe" else dense)


def _rules(types: list[str], *, has_bias: bool) -> dict[str, TensorRule]:
    """Those of the feed-forwards that there are."""
    rules = {}
    if {"mlp", "moe"} & set(types):
        rules["mlp_norm.scale"] = tensors(f"{LAYER}norm.weight")
    if "mlp" in types:
        for name, stored in (("gate_up", "up"), ("down", "down")):
            rules[f"mlp.{name}_kernel"] = tensors(f"{MIXER}{stored}_proj.weight")
            if has_bias:
                rules[f"mlp.{name}_bias"] = tensors(f"{MIXER}{stored}_proj.bias")
    if "moe" in types:
        rules |= {
            "mlp.router.kernel": tensors(f"{MIXER}gate.weight"),
            "mlp.router.correction": tensors(f"{MIXER}gate.e_score_correction_bias"),
            GATE_UP: tensors(f"{MIXER}experts.{{experts}}.up_proj.weight"),
            DOWN: tensors(f"{MIXER}experts.{{experts}}.down_proj.weight"),
            "mlp.shared.gate_up_kernel": tensors(f"{MIXER}shared_experts.up_proj.weight"),
            "mlp.shared.down_kernel": tensors(f"{MIXER}shared_experts.down_proj.weight"),
        }
    return rules


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    nemotron_h,
    fields=NemotronHFields,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "eos_token_id": 2,
    },
    fixed={"use_sliding_window": False, "attention_bias": False},
    supported={
        "tie_word_embeddings": (False,),
        "moe_latent_size": (None,),
        **dict.fromkeys(("mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_conv_bias"), (None,)),
    },
    tensors=TENSORS,
)
