"""What drafts for a model, read and checked: a smaller model, or a draft head."""

from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.models.head_specs import MTPHeadSpec
from engine.models.heads.head_config import read_head
from engine.models.heads.mtp_layer import check_stored
from engine.models.heads.read_mtp import read_mtp
from engine.models.layers.cache_layout import cache_layout
from engine.models.model_config import read_model_config
from engine.models.spec import ModelSpec
from engine.speculation.speculative_config import EAGLE3, MTP


def read_draft(
    config: EngineConfig, of_draft: EngineConfig, model: ModelSpec, read: Callable[[], ModelSpec]
) -> ModelSpec:
    """What drafts for a model: a draft head, or a draft model, which ``read`` reads.

    Raises ConfigurationError for one that cannot.
    """
    name, speculation = str(of_draft.model), config.speculation
    if speculation is not None and speculation.method == MTP:
        return _checked_head(read_mtp(of_draft.directory if speculation.model else None, model, name), model)
    if speculation is not None and speculation.method == EAGLE3:
        return _checked_head(read_head(of_draft.directory, model, name), model)
    return _draft_spec(read(), model, name)


def read_stored_draft(config: EngineConfig, of_draft: EngineConfig, model: ModelSpec) -> ModelSpec:
    """The same from a directory with weights, in which the layer that drafts has to be, too."""
    drafting = read_draft(config, of_draft, model, lambda: read_model_config(of_draft.directory))
    if isinstance(drafting.head, MTPHeadSpec):
        check_stored(of_draft.directory, drafting.head.prefix)
    return drafting


def _draft_spec(draft: ModelSpec, model: ModelSpec, name: str) -> ModelSpec:
    """A model as it drafts for another: it keeps the keys and values of all tokens.

    Raises ConfigurationError unless it can draft for ``model``; ``name`` is the draft model's.
    """
    if draft.vocab_size != model.vocab_size:
        raise ConfigurationError(
            f"speculative_config: the draft model {name} has a vocabulary of {draft.vocab_size:,} tokens, and the model "
            f"one of {model.vocab_size:,}: choose a draft model of the same vocabulary"
        )
    if cache_layout(draft.blocks).states:
        raise ConfigurationError(
            f"speculative_config: the draft model {name} has recurrent layers, whose states cannot go back behind a "
            "wrong draft: choose another"
        )
    _check_pages(model)
    return replace(draft, keeps_all=True)


def _checked_head(head: ModelSpec, model: ModelSpec) -> ModelSpec:
    """A draft head. Raises ConfigurationError if the model has no pages for it."""
    _check_pages(model)
    return head


def _check_pages(model: ModelSpec) -> None:
    if None not in cache_layout(model.blocks).windows:
        raise ConfigurationError(
            "speculative_config: a draft model needs pages of all tokens, and all layers of this model have windows: "
            "choose the method ngram"
        )
