"""Qwen 3 with experts in all layers, or in every few."""

from collections.abc import Collection
from dataclasses import replace

from engine.models.family import Family, Fields, decoder_spec, with_experts
from engine.models.layers.expert_router import RouterSpec
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.requirements import Count
from engine.models.spec import ModelSpec


class QwenMoeFields(Fields):
    """The family's own keys, with the defaults of transformers."""

    num_experts: Count = 128
    num_local_experts: Count | None = None
    """What transformers 5 writes for ``num_experts``."""
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool = False

    @property
    def sparse_layers(self) -> Collection[int]:
        """The layers with experts."""
        step, dense = self.decoder_sparse_step, self.mlp_only_layers or ()
        return [layer for layer in range(step - 1, self.num_hidden_layers, step) if layer not in dense]

    @property
    def experts(self) -> ExpertsSpec:
        """The feed-forward of these layers. Raises UnsupportedError."""
        return ExpertsSpec(
            self.moe_intermediate_size,
            self.num_local_experts or self.num_experts,
            self.num_experts_per_tok,
            RouterSpec(normalised=self.norm_topk_prob),
            self.activation,
        )

    def experts_beside(self, columns: int) -> ExpertsSpec:
        """The same beside a shared expert of so many columns, which has a gate. Raises UnsupportedError."""
        shared = GatedSpec(columns, activation=self.activation)
        return replace(self.experts, shared=shared, shared_gate=True)


def qwen3_moe(fields: QwenMoeFields) -> ModelSpec:
    """If a window is in use, all layers slide."""
    return with_experts(decoder_spec(fields, qk_norm=True), fields.experts, fields.sparse_layers)


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qwen3_moe,
    fields=QwenMoeFields,
    defaults={"num_key_value_heads": 4},
    fixed={"mlp_bias": False, "max_window_layers": 0, "layer_types": None},
)
