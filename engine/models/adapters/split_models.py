"""Which models split the residual stream over devices in steps with adapters.

They are those of plain blocks: self-attention and a gated feed-forward, each one kernel behind a
norm. What comes behind a sum over devices, such as a norm of it, would need an exchange more.
"""

from dataclasses import replace

from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, NormPlan

MOST_DEVICES = 8
"""On sixteen chips (v5e:4x4, v6e:4x4) XLA has no reduce-scatter: it reduces all of the parts on each."""


def splits_residual(partition: Partition) -> bool:
    """Whether steps with adapters do (engine/models/adapters/split_residual.py)."""
    model = partition.model
    return (
        1 < partition.devices <= MOST_DEVICES
        and model.hidden_size % partition.devices == 0
        and not model.centered_norms
        and model.norm_scales
        and model.per_layer_inputs is None
        and all(map(_is_plain, model.blocks))
    )


def _is_plain(block: BlockSpec) -> bool:
    known = BlockSpec(block.mixer, block.feed_forward, residual_scale=block.residual_scale)
    return (
        block in (known, replace(known, feed_forward_norms=NormPlan.BEFORE))
        and isinstance(block.mixer, SelfAttentionSpec)
        and not block.mixer.gate_proj
        and block.mixer.value_dim is None
        and isinstance(block.feed_forward, GatedSpec)
    )
