"""The kinds of draft heads, by the ModelSpec that each one has."""

from engine.models.head_specs import AssistantSpec, MTPHeadSpec
from engine.models.heads.assistant import Assistant
from engine.models.heads.assistant_tensors import AssistantTensors
from engine.models.heads.eagle_head import EagleHead
from engine.models.heads.head_tensors import HeadTensors
from engine.models.heads.mtp_head import MTPHead
from engine.models.heads.mtp_layer import MTPTensors
from engine.models.partition import Partition
from engine.models.spec import ModelSpec
from engine.models.weights.sources.tensor_source import TensorSource

DraftHead = EagleHead | MTPHead | Assistant


def draft_head(partition: Partition) -> DraftHead:
    """The module of a model that is a draft head; its weights are zeros, for their shapes."""
    match partition.model.head:
        case MTPHeadSpec():
            return MTPHead(partition)
        case AssistantSpec():
            return Assistant(partition)
    return EagleHead(partition)


def tensors_of_head(source: TensorSource, model: ModelSpec) -> TensorSource:
    """The tensors of a draft head under the names that its parameters call for."""
    match model.head:
        case MTPHeadSpec(prefix=prefix):
            return MTPTensors(source, prefix)
        case AssistantSpec():
            return AssistantTensors(source, model.vocab_size)
    return HeadTensors(source, model.vocab_size)
