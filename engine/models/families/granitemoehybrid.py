"""Granite 4: Mamba-2 with some layers of attention, mostly without rope; dense or with experts."""

import math
from dataclasses import replace
from typing import Literal

import msgspec

from engine.models.families.granite import granite
from engine.models.families.granitemoe import SHARED, TENSORS, GraniteMoeFields, granite_moe
from engine.models.family import Family, linear_layers, with_attention, with_mixers
from engine.models.layers.mamba2 import Mamba2Spec
from engine.models.requirements import Count, require
from engine.models.rope_spec import NO_ROPE
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import tensors

DENSE_TENSORS = {
    "mlp.gate_up_kernel": tensors(*[f"{SHARED}input_linear.weight"] * 2, along="gate_up"),
    "mlp.down_kernel": tensors(f"{SHARED}output_linear.weight"),
}


class WrittenFloat(msgspec.Struct, forbid_unknown_fields=True):
    """How transformers 5 writes what JSON has no number for: ``{"__float__": "Infinity"}``."""

    name: Literal["Infinity"] = msgspec.field(name="__float__")


class GraniteHybridFields(GraniteMoeFields):
    """The family's own keys, with the defaults of transformers."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: Count = 1024
    position_embedding_type: str | None = None
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float | WrittenFloat] | None = None

    @property
    def mamba_width(self) -> int:
        """The numbers of all heads of Mamba-2 together."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba(self) -> Mamba2Spec:
        """The mixer of linear layers. Raises UnsupportedError."""
        heads, groups, wide = self.mamba_n_heads, self.mamba_n_groups, self.mamba_width
        size = wide // heads if self.mamba_d_head == "auto" else self.mamba_d_head
        require(heads * size == wide, f"mamba_n_heads {heads} of {size} are not the {wide} numbers of Mamba-2")
        require(heads % groups == 0, f"mamba_n_groups {groups} does not divide mamba_n_heads {heads}")
        require(self.mamba_d_conv > 1, "mamba_d_conv 1 is not supported")
        least, most = self.time_step_limit or (0.0, math.inf)
        return Mamba2Spec(
            heads,
            size,
            groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            self.mamba_conv_bias,
            self.mamba_proj_bias,
            self.mamba_proj_bias,
            least,
            math.inf if isinstance(most, WrittenFloat) else most,
            activation=self.activation,
        )


def granite_hybrid(fields: GraniteHybridFields) -> ModelSpec:
    """Without experts, the shared one is the feed-forward."""
    plain = msgspec.structs.replace(fields, layer_types=None)
    if fields.num_local_experts:
        require(fields.num_experts_per_tok > 0, "num_experts_per_tok must be at least 1 of num_local_experts")
        model = granite_moe(plain)
        model = replace(model, tensors=(*TENSORS.items(), *model.tensors))
    else:
        plain = msgspec.structs.replace(plain, intermediate_size=fields.shared_intermediate_size)
        model = replace(granite(plain), tensors=tuple(DENSE_TENSORS.items()))
    if fields.position_embedding_type != "rope":
        model = replace(with_attention(model, rope=NO_ROPE), max_position=fields.max_position_embeddings)
    layers = fields.num_hidden_layers
    linear = linear_layers(fields.layer_types or ["linear_attention"] * layers, layers)
    return with_mixers(model, fields.mamba, linear)


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    granite_hybrid,
    fields=GraniteHybridFields,
    defaults={"eos_token_id": 2},
    fixed={"use_sliding_window": False, "mlp_bias": False},
)
