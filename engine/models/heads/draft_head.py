"""The kinds of draft heads, by the ModelSpec that each one has."""

from flax import nnx

from engine.models.heads.eagle_head import EagleHead
from engine.models.heads.head_tensors import HeadTensors
from engine.models.heads.mtp_head import MTPHead
from engine.models.heads.mtp_layer import MTPTensors
from engine.models.partition import Partition
from engine.models.spec import ModelSpec, MTPHeadSpec
from engine.models.weights.sources import TensorSource

DraftHead = EagleHead | MTPHead


def draft_head(partition: Partition, rngs: nnx.Rngs) -> DraftHead:
    """The module of a model that is a draft head."""
    return MTPHead(partition, rngs) if isinstance(partition.model.head, MTPHeadSpec) else EagleHead(partition, rngs)


def tensors_of_head(source: TensorSource, model: ModelSpec) -> TensorSource:
    """The tensors of a draft head under the names that its parameters call for."""
    if isinstance(model.head, MTPHeadSpec):
        return MTPTensors(source, model.head.prefix)
    return HeadTensors(source, model.vocab_size)
