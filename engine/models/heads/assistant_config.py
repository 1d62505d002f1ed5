"""Reads the config.json of an assistant of Gemma 4: a small decoder that reads the model's pages.

Its layers have queries alone. Each reads the keys and values of the model's last layer of its type
that has such, as ``shared_kv_states`` of transformers 5 (models/gemma4_assistant).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.families.gemma4_text import FAMILY, Gemma4Fields, gemma4_layers, layer_types
from engine.models.head_specs import AssistantSpec, Clusters
from engine.models.heads.head_names import check_assistant
from engine.models.layers.mixer import KeysAndValues
from engine.models.layers.self_attention import self_attention
from engine.models.requirements import Count, UnsupportedError, require, require_one_of
from engine.models.spec import BlockSpec, ModelSpec
from engine.models.weights.published.formats import KEYS
from engine.models.weights.sources.checkpoint import read_json

NONE_OF = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Keys of the text model that no assistant asks for."""
EMBEDDING = r"model\.embed_tokens\.weight"
"""It is the table of logits, or nothing: tokens are embedded by the model's."""


class _AssistantFields(msgspec.Struct):
    """The keys beside those of the text model, with the defaults of transformers."""

    text_config: dict[str, Any]
    backbone_hidden_size: Count = 1536
    use_ordered_embeddings: bool = False
    num_centroids: Count = 2048
    centroid_intermediate_top_k: Count = 32
    tie_word_embeddings: bool = True
    dtype: str | None = None
    torch_dtype: str | None = None


def read_assistant(directory: Path, model: ModelSpec, name: str) -> ModelSpec:
    """The assistant in a directory, for a model.

    Raises ConfigurationError, with what does not fit. ``name`` is the assistant's.
    """
    check_assistant(directory)
    path = directory / "config.json"
    if not model.last_layers:
        raise ConfigurationError(
            f"speculative_config: {name} is an assistant of Gemma 4, and the model is no Gemma 4: choose another method"
        )
    given = read_json(path, dict[str, Any])
    try:
        for key in KEYS:
            require(not given.get(key), f"{key} is not supported of an assistant")
        return _assistant(msgspec.convert(given, _AssistantFields), model, name)
    except (msgspec.ValidationError, UnsupportedError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _assistant(fields: _AssistantFields, model: ModelSpec, name: str) -> ModelSpec:
    text = _text_fields(fields)
    for what, theirs, ours in (
        ("a vocabulary of {:,} tokens", text.vocab_size, model.vocab_size),
        ("hidden states of {:,} numbers", fields.backbone_hidden_size, model.hidden_size),
    ):
        require(
            theirs == ours,
            f"the assistant {name} is for {what.format(theirs)}, and the model has {what.format(ours)}: choose the "
            "assistant that was made for it",
        )
    types, last = layer_types(text), dict(model.last_layers)
    for layer_type in types:
        require_one_of("layer_types", layer_type, tuple(last))
    sources = [last[layer_type] for layer_type in types]
    plain = gemma4_layers(text, sources)
    pages = tuple(cached for mixer in model.mixers if isinstance(cached := mixer.cached, KeysAndValues))
    most = max(cached.kv_heads for cached in pages)
    require(
        text.num_attention_heads % most == 0,
        f"num_attention_heads {text.num_attention_heads} is no multiple of the model's {most} kv heads",
    )
    assert model.embedding_multiplier is not None
    return replace(
        plain,
        blocks=tuple(_blocks(plain, sources, model, name)),
        tied_embeddings=fields.tie_word_embeddings,
        logit_soft_cap=None,
        unused_tensors=plain.unused_tensors if fields.tie_word_embeddings else f"{plain.unused_tensors}|{EMBEDDING}",
        head=AssistantSpec(fields.backbone_hidden_size, model.embedding_multiplier, pages, _clusters(fields, text)),
    )


def _text_fields(fields: _AssistantFields) -> Gemma4Fields:
    """The keys of its decoder. ``num_kv_shared_layers`` is all, whatever they say."""
    given = FAMILY.filled(fields.text_config)
    require_one_of("model_type", given.get("model_type", FAMILY.model_type), (FAMILY.model_type,))
    for key, none in NONE_OF.items():
        require_one_of(key, given.pop(key, none), (none,))
    given.pop("vocab_size_per_layer_input", None)  # nothing reads it
    dtype = given.get("dtype") or given.get("torch_dtype") or fields.dtype or fields.torch_dtype
    return msgspec.convert({**given, "hidden_size_per_layer_input": 0, "dtype": dtype}, Gemma4Fields)


def _blocks(plain: ModelSpec, sources: Sequence[int], model: ModelSpec, name: str) -> Iterator[BlockSpec]:
    """The layers, each with the model's one that it reads. Raises UnsupportedError if keys differ.

    A query is at the position behind the last key. It sees one key more than a layer of the model,
    as the bidirectional mask of transformers does, whose window counts distances.
    """
    for block, source in zip(plain.blocks, sources, strict=True):
        mixer, theirs = self_attention(block), self_attention(model.blocks[source])
        for what, ours, of_model in (
            ("heads of {:,} numbers", mixer.head_dim, theirs.head_dim),
            ("{:,} kv heads", mixer.num_kv_heads, theirs.num_kv_heads),
            ("windows of {:,} tokens", mixer.scores.window or 0, theirs.scores.window or 0),
        ):
            require(
                ours == of_model,
                f"the assistant {name} reads keys of {what.format(ours)}, and layer {source} of the model has "
                f"{what.format(of_model)}: choose the assistant that was made for it",
            )
        window = mixer.scores.window
        scores = replace(mixer.scores, window=None if window is None else window + 1)
        yield replace(block, mixer=replace(mixer, of_model=True, scores=scores))


def _clusters(fields: _AssistantFields, text: Gemma4Fields) -> Clusters | None:
    count, chosen = fields.num_centroids, fields.centroid_intermediate_top_k
    if not fields.use_ordered_embeddings:
        return None
    require(text.vocab_size % count == 0, f"num_centroids {count} does not divide vocab_size {text.vocab_size}")
    require(chosen <= count, f"centroid_intermediate_top_k {chosen} is more than num_centroids {count}")
    return Clusters(count, chosen)
