"""Reads the config.json of a draft head of EAGLE-3, as it is published by itself.

There are two forms. The authors' and SpecForge's has the keys of a Llama of one layer and
``draft_vocab_size``. That of vLLM's "speculators" has them in ``transformer_layer_config``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.family import Fields, decoder_spec
from engine.models.head_specs import EagleHeadSpec
from engine.models.heads.head_names import check_head
from engine.models.heads.head_tensors import head_name
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, UnsupportedError, require, require_one_of
from engine.models.spec import ModelSpec
from engine.models.weights.parameters import TOKENS
from engine.models.weights.sources.checkpoint import read_json, stored_names

LAYER_CONFIG = "transformer_layer_config"
UNSUPPORTED = ("quantization_config", "norm_before_fc", "norm_output", "fc_norm")
"""Keys that, if they are set, ask for what no head here does."""


class _HeadFields(Fields):
    """The keys of a head's ``config.json``."""

    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    """The layers of which it reads the input, as vLLM counts."""
    eagle_config: "_Nested | None" = None


class _Nested(msgspec.Struct):
    """The key ``eagle_config`` of ModelOpt's and SpecForge's heads."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    """The layers of which it reads the output."""
    use_aux_hidden_state: bool = True


def read_head(directory: Path, model: ModelSpec, name: str) -> ModelSpec:
    """The draft head in a directory, for a model.

    Raises ConfigurationError, with what does not fit. ``name`` is the head's.
    """
    check_head(directory)
    path = directory / "config.json"
    try:
        return _head(_flat(read_json(path, dict[str, Any])), model, name, stored_names(directory))
    except (msgspec.ValidationError, UnsupportedError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of a head, of which a layer's may be within another."""
    for key in UNSUPPORTED:
        require(not given.get(key), f"{key} is not supported of a draft head: leave it out, or use another")
    layer = given.get(LAYER_CONFIG, {})
    require(isinstance(layer, dict), f"{LAYER_CONFIG} is not an object")
    flat = {**given, **layer}
    require_one_of("model_type", flat.get("model_type", "llama"), ("llama",))
    return {key: value for key, value in flat.items() if value is not None}


def _head(given: dict[str, Any], model: ModelSpec, name: str, names: Any) -> ModelSpec:
    fields = msgspec.convert({"num_hidden_layers": 1, **given}, _HeadFields)
    require(
        fields.num_hidden_layers == 1,
        f"a draft head of {fields.num_hidden_layers} layers is not supported: supported is one",
    )
    require(not fields.layer_types, "layer_types are not supported of a draft head")
    count, tapped = fields.draft_vocab_size or fields.vocab_size, fields.target_hidden_size or fields.hidden_size
    _check_fit(fields, count, tapped, model, name)
    stored = None if names is None else {head_name(one) for one in names}
    own = tapped != fields.hidden_size if stored is None else "model.embed_tokens.weight" in stored
    require(
        own or fields.hidden_size == model.hidden_size,
        f"the draft head {name} has no embed_tokens, and its hidden_size {fields.hidden_size} is not the model's "
        f"{model.hidden_size}",
    )
    has_tokens = count != fields.vocab_size if stored is None else TOKENS in stored
    require(
        has_tokens or count == fields.vocab_size,
        f"the draft head {name} drafts {count:,} of {fields.vocab_size:,} tokens, and has no {TOKENS} that says which",
    )
    head = EagleHeadSpec(_taps(fields, model, name), tapped, count, has_tokens, own, fields.norm_before_residual)
    plain = decoder_spec(msgspec.structs.replace(fields, use_sliding_window=False))
    (block,) = plain.blocks
    mixer = self_attention(block)
    wide = replace(mixer, scores=replace(mixer.scores, first=1), input_size=2 * fields.hidden_size)
    return replace(plain, blocks=(replace(block, mixer=wide),), head=head)


def _check_fit(fields: _HeadFields, count: int, tapped: int, model: ModelSpec, name: str) -> None:
    """Raises UnsupportedError for what is not the model's."""
    for what, theirs, ours in (
        ("a vocabulary of {:,} tokens", fields.vocab_size, model.vocab_size),
        ("hidden states of {:,} numbers", tapped, model.hidden_size),
    ):
        require(
            theirs == ours,
            f"the draft head {name} is for {what.format(theirs)}, and the model has {what.format(ours)}: choose the head "
            "that was made for it",
        )
    require(count <= fields.vocab_size, f"draft_vocab_size {count} is more than vocab_size {fields.vocab_size}")


def _taps(fields: _HeadFields, model: ModelSpec, name: str) -> tuple[int, ...]:
    """The layers of the model whose input the head reads."""
    count, nested = model.num_layers, fields.eagle_config or _Nested()
    require(nested.use_aux_hidden_state, "eagle_config has use_aux_hidden_state false, which is not supported")
    taps: tuple[int, ...] = (2, count // 2, count - 3)
    if fields.eagle_aux_hidden_state_layer_ids:
        taps = tuple(fields.eagle_aux_hidden_state_layer_ids)
    elif nested.eagle_aux_hidden_state_layer_ids:
        taps = tuple(layer + 1 for layer in nested.eagle_aux_hidden_state_layer_ids)
    require(
        len(set(taps)) == len(taps) and all(0 <= layer < count for layer in taps),
        f"the draft head {name} reads the inputs of the layers {', '.join(map(str, taps))}, which have to be different, "
        f"and the model has {count}",
    )
    return taps
