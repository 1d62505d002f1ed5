"""The layer that predicts further tokens, in the checkpoint of the model that it is for."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import ConfigurationError
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.latent_attention import LatentAttentionSpec
from engine.models.layers.mixer import MixerSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.spec import ModelSpec, MTPHeadSpec
from engine.models.weights.sources import RenamedTensors, stored_names

REPEATED = ("embed_tokens.weight", "shared_head.head.weight")
"""The model's own tables, which checkpoints repeat in this layer."""


def mtp_head(model: ModelSpec) -> ModelSpec:
    """The further layer of a model's checkpoint as a draft head, which is a model of one layer.

    It is like the model's last one, or like the last one with experts if any has such.
    Raises ConfigurationError unless there is exactly one.
    """
    if model.further_layers != 1:
        has = f"{model.further_layers} of them, and supported is one" if model.further_layers else "none"
        raise ConfigurationError(
            "speculative_config: the method mtp drafts with the layer of a checkpoint that predicts further tokens "
            f"(num_nextn_predict_layers), and this model has {has}: choose another method"
        )
    head = MTPHeadSpec(f"model.layers.{model.num_layers}.")
    block = next((one for one in reversed(model.blocks) if isinstance(one.feed_forward, ExpertsSpec)), model.blocks[-1])
    unserved = tuple(part for part in model.unserved if part[0] != head.prefix)
    mixer = _without_first(block.mixer)
    return replace(
        model, blocks=(replace(block, mixer=mixer),), head=head, unserved=unserved, further_layers=0, keeps_all=True
    )


def check_stored(directory: Path, prefix: str) -> None:
    """Raises ConfigurationError if a directory's weights have no tensors of this prefix."""
    names = stored_names(directory)
    if names is not None and not any(name.startswith(prefix) for name in names):
        raise ConfigurationError(
            f"speculative_config: config.json of {directory} has num_nextn_predict_layers 1, and its weights have no "
            f"{prefix}*, the layer that predicts further tokens: choose a checkpoint with it, or another method than mtp"
        )


def _without_first(mixer: MixerSpec | None) -> MixerSpec:
    """The mixer of a layer in which no token sees the first one."""
    if isinstance(mixer, SelfAttentionSpec):
        return replace(mixer, scores=replace(mixer.scores, first=1))
    assert isinstance(mixer, LatentAttentionSpec)
    return replace(mixer, first=1)


@dataclass(frozen=True)
class MTPTensors(RenamedTensors):
    """A TensorSource: the layer's of a checkpoint as if it were a model of one layer."""

    prefix: str

    def renamed(self, name: str) -> str | None:
        """See RenamedTensors."""
        own = name.removeprefix(self.prefix)
        return None if own == name or own in REPEATED else f"model.layers.0.{own}"
