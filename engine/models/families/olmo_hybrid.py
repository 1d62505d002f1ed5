"""OLMo Hybrid: delta nets with norms before them, and every fourth layer OLMo 3's, most often without rope."""

from dataclasses import replace

import msgspec

from engine.models.family import Family, Fields, decoder_spec, linear_layers, uniform_rope, with_mixers
from engine.models.layers.delta_net import LINEAR, DeltaNetSpec
from engine.models.requirements import Count, Positive
from engine.models.rope_spec import NO_ROPE, RopeSpec
from engine.models.spec import ModelSpec, NormPlan
from engine.models.weights.parameters import LAYER, TensorRule, tensors

NORMS = {
    "attention_norm.scale": tensors(f"{LAYER}input_layernorm.weight"),
    "mlp_norm.scale": tensors(f"{LAYER}post_attention_layernorm.weight"),
}
"""Of the linear layers, by the names of transformers' modules."""
PUBLISHED = {
    "attention_norm.scale": tensors(f"{LAYER}attention_layer_norm.weight"),
    "mlp_norm.scale": tensors(f"{LAYER}feedforward_layer_norm.weight"),
}


class OlmoHybridFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    rope_theta: Positive | None = 10_000.0
    """A null is no rope."""
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4
    linear_allow_neg_eigval: bool = True

    @property
    def delta_net(self) -> DeltaNetSpec:
        """The mixer of the linear layers. Raises UnsupportedError."""
        keys = self.linear_num_key_heads or self.num_attention_heads
        values = self.linear_num_value_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / keys)
        return DeltaNetSpec(
            keys,
            values,
            key_dim,
            self.linear_value_head_dim or 2 * key_dim,
            self.linear_conv_kernel_dim,
            self.activation,
            norm_eps=1e-5,
            beta_scale=2.0 if self.linear_allow_neg_eigval else 1.0,
        )

    @property
    def types(self) -> list[str]:
        """``layer_types``; by default every fourth layer is full, or the last where there are fewer."""
        last = self.num_hidden_layers - 1
        full = {*range(3, last + 1, 4)} or {last}
        each = ["full_attention" if layer in full else "linear_attention" for layer in range(last + 1)]
        return each if self.layer_types is None else self.layer_types


def olmo_hybrid(fields: OlmoHybridFields) -> ModelSpec:
    """A linear layer has its norms before its parts, a full one behind them."""
    linear, net = linear_layers(fields.types, fields.num_hidden_layers), fields.delta_net
    plain = msgspec.structs.replace(fields, layer_types=None)
    ropes = [_rope(fields)] * fields.num_hidden_layers
    model = decoder_spec(plain, joint_qk_norm=True, norms=NormPlan.AFTER, ropes=ropes)
    model = with_mixers(model, net, linear)
    blocks = enumerate(model.blocks)
    return replace(
        model,
        blocks=tuple(replace(block, norms=NormPlan.BEFORE) if n in linear else block for n, block in blocks),
        tensors=tuple(_rules(net).items()) if linear else (),
    )


def _rope(fields: OlmoHybridFields) -> RopeSpec:
    given = fields.rope_scaling or fields.rope_parameters or {}
    return NO_ROPE if given.get("rope_theta", fields.rope_theta) is None else uniform_rope(fields)


def _rules(net: DeltaNetSpec) -> dict[str, TensorRule]:
    """Each part has tensors of its own; transformers' module has one convolution."""
    kernels = (f"{LINEAR}{name}_proj.weight" for name in "qkvg")
    convolutions = [f"{LINEAR}{name}_conv1d.weight" for name in "qkv"]
    whole, own = (
        tensors(*names, along="columns", sizes=net.parts[:3], stored="(groups columns) () taps")
        for names in ([f"{LINEAR}conv1d.weight"] * 3, convolutions)
    )
    return {
        **{name: replace(rule, otherwise=NORMS[name]) for name, rule in PUBLISHED.items()},
        "delta_net.in_kernel": tensors(*kernels, along="columns", sizes=net.parts),
        "delta_net.gates_kernel": tensors(
            f"{LINEAR}b_proj.weight", f"{LINEAR}a_proj.weight", along="columns", sizes=(net.group, net.group)
        ),
        "delta_net.convolution": replace(own, otherwise=whole),
        "delta_net.norm.scale": tensors(f"{LINEAR}o_norm.weight"),
        "delta_net.out_kernel": tensors(f"{LINEAR}o_proj.weight"),
    }


FAMILY = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    olmo_hybrid,
    fields=OlmoHybridFields,
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "eos_token_id": 100257,
    },
    fixed={"use_sliding_window": False, "mlp_bias": False},
)
