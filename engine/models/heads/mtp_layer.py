"""The layer that predicts further tokens, in the checkpoint of the model that it is for."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import ConfigurationError
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.latent_attention import LatentAttentionSpec
from engine.models.layers.mixer import MixerSpec, State
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import TensorRule, tensors
from engine.models.weights.sources.checkpoint import stored_names
from engine.models.weights.sources.tensor_source import RenamedTensors

REPEATED = ("embed_tokens.weight", "shared_head.head.weight")
"""The model's own tables, which checkpoints repeat in this layer."""
NORMS = {"embedding_norm": "enorm", "feature_norm": "hnorm", "norm": "shared_head.norm"}
"""Of the layer beside those of every layer: of the token, of the feature, and before the logits."""
OTHER_NAMES = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head.norm",
}
"""Parts of the layer as Qwen publishes them, whose block is ``layers.0``, and as DeepSeek does."""


def mtp_head(model: ModelSpec) -> ModelSpec:
    """The further layer of a model's checkpoint as a draft head, which is a model of one layer.

    It is like the model's last one, or like the last one with experts if any has such; its attention
    is that of the last layer with one.
    Raises ConfigurationError unless there is exactly one.
    """
    if len(model.further_layers) != 1:
        has = f"{len(model.further_layers)} of them, and supported is one" if model.further_layers else "none"
        raise ConfigurationError(
            "speculative_config: the method mtp drafts with the layer of a checkpoint that predicts further tokens "
            f"(multi-token prediction), and this model has {has}: choose another method"
        )
    (head,) = model.further_layers
    block = next((one for one in reversed(model.blocks) if isinstance(one.feed_forward, ExpertsSpec)), model.blocks[-1])
    unserved = tuple(part for part in model.unserved if part[0] != head.prefix)
    attention = next(mixer for mixer in reversed(model.mixers) if not isinstance(mixer.cached, State))
    return replace(
        model,
        blocks=(replace(block, mixer=_without_first(attention)),),
        head=head,
        unserved=unserved,
        further_layers=(),
        keeps_all=True,
        tensors=tuple((dict(model.tensors) | _norm_rules(model)).items()),
    )


def _norm_rules(model: ModelSpec) -> dict[str, TensorRule]:
    """The rules of the layer's norms beside those of every layer: stored as the model's last one is."""
    of_last = dict(model.tensors).get("norm.scale")
    if of_last is None:
        return {}
    return {
        f"{name}.scale": tensors(f"model.layers.0.{stored}.weight", transform=of_last.transform)
        for name, stored in NORMS.items()
    }


def check_stored(directory: Path, prefix: str) -> None:
    """Raises ConfigurationError if a directory's weights have no tensors of this prefix."""
    names = stored_names(directory)
    if names is not None and not any(name.startswith(prefix) for name in names):
        raise ConfigurationError(
            f"speculative_config: a model as {directory} has it is published with a layer that predicts further tokens, and "
            f"its weights have no {prefix}*, that layer: choose a checkpoint with it, or another method than mtp"
        )


def _without_first(mixer: MixerSpec) -> MixerSpec:
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
        if own == name or own in REPEATED:
            return None
        part, _, rest = own.partition(".")
        return f"model.layers.0.{OTHER_NAMES.get(part, part)}.{rest}".replace(".layers.0.layers.0.", ".layers.0.")
