"""The families served: how each one's Hugging Face ``config.json`` comes down to a ModelConfig.

A family is a row: what transformers assumes where its config.json is silent, and what the family's code
fixes whatever config.json says. Keys mean what they mean to transformers 5; its version 4 spellings
(``rope_theta`` and ``rope_scaling`` for ``rope_parameters``, ``torch_dtype`` for ``dtype``) are read too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.errors import ConfigurationError
from engine.models.checkpoint import read_json, weight_files
from engine.models.config import ModelConfig, RopeConfig
from engine.vocabulary import MAX_EOS_TOKEN_IDS

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Family:
    """One ``model_type``."""

    architecture: str
    defaults: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", defaults={"eos_token_id": 2}, fixed={"use_sliding_window": False}),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        fixed={"use_sliding_window": True, "max_window_layers": 0, **_NO_BIASES},
    ),
    "qwen2": Family("Qwen2ForCausalLM", fixed=_NO_BIASES, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", defaults={"head_dim": 128}, fixed={"mlp_bias": False}, qk_norm=True),
}

DTYPES = (None, "float32", "float16", "bfloat16")
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (1, None),
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
}
"""Keys under which a checkpoint may ask for something else, and all that there is: the default first."""


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The rope types served, and what each must be told; the keys are also RopeConfig's."""

LAYER_TYPES = ("full_attention", "sliding_attention")


class _Kind(msgspec.Struct):
    """The keys of ``config.json`` that tell the family."""

    model_type: str | None = None
    architectures: list[str] | None = None


class _Rope(msgspec.Struct):
    """``rope_parameters`` or ``rope_scaling``; ``type`` is the oldest spelling of ``rope_type``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None
    full_attention: Any = None
    sliding_attention: Any = None


class _Eos(msgspec.Struct):
    """The one key that ``generation_config.json`` is read for."""

    eos_token_id: int | list[int] | None = None


class _Fields(msgspec.Struct):
    """The keys of ``config.json`` that shape the decoder, with the defaults that all families share."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: Count | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _UnsupportedError(Exception):
    """What the decoder cannot be; ``read_model_config`` adds which file asks for it."""


def read_model_config(directory: Path) -> ModelConfig:
    """The decoder that a Hugging Face directory holds.

    Raises ConfigurationError, which says what to do, where the directory is no model, or holds one that the
    decoder cannot be.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory: give the path of a downloaded model")
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{directory} has no config.json: give the directory of a Hugging Face model")
    model = read_config_file(path)
    weight_files(directory)
    return model


def read_config_file(path: Path) -> ModelConfig:
    """The decoder that a ``config.json`` describes, whether or not its weights are there. Raises ConfigurationError."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file: give a config.json, or the directory of a Hugging Face model")
    given = read_json(path, dict[str, Any])
    try:
        family = _family(given)
        _refuse_unsupported(given)
        fields = msgspec.convert({**family.defaults, **given, **family.fixed}, _Fields)
        return _model_config(family, fields, _eos_token_ids(path.parent, fields))
    except (msgspec.ValidationError, _UnsupportedError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _UnsupportedError(message)


def _family(given: dict[str, Any]) -> Family:
    kind = msgspec.convert(given, _Kind)
    supported = ", ".join(f"{model_type} ({family.architecture})" for model_type, family in FAMILIES.items())
    family = FAMILIES.get(kind.model_type or "")
    if family is None:
        raise _UnsupportedError(f"model_type {kind.model_type!r} is not supported; supported are {supported}")
    _require(
        not kind.architectures or family.architecture in kind.architectures,
        f"architectures {kind.architectures} are not supported; supported are {supported}",
    )
    return family


def _refuse_unsupported(given: dict[str, Any]) -> None:
    for key, supported in SUPPORTED_VALUES.items():
        _require_one_of(key, given.get(key, supported[0]), supported)


def _require_one_of(key: str, value: object, supported: tuple[Any, ...]) -> None:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
    named = ", ".join(str(other) for other in supported if other is not None) or "none"
    _require(value in supported, f"{key} {shown} is not supported; supported: {named}")


def _model_config(family: Family, fields: _Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    heads, hidden = fields.num_attention_heads, fields.hidden_size
    kv_heads = fields.num_key_value_heads or heads
    _require(heads % kv_heads == 0, f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    _require(
        fields.head_dim is not None or hidden % heads == 0,
        f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim",
    )
    head_dim = fields.head_dim or hidden // heads
    _require(head_dim % 2 == 0, f"head_dim {head_dim} must be even for rotary embedding")
    rope = _rope(fields)
    return ModelConfig(
        vocab_size=fields.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_max_position(fields, rope),
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        tied_embeddings=fields.tie_word_embeddings,
        qkv_bias=family.qkv_bias or fields.attention_bias,
        output_bias=fields.attention_bias,
        mlp_bias=fields.mlp_bias,
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(fields),
        eos_token_ids=eos_token_ids,
        dtype=fields.dtype or fields.torch_dtype or "float32",
    )


def _rope(fields: _Fields) -> RopeConfig:
    rope = fields.rope_scaling or fields.rope_parameters or _Rope()
    _require(
        rope.full_attention is None and rope.sliding_attention is None,
        "rope parameters that differ by layer type are not supported; supported is one set for all layers",
    )
    partial = rope.partial_rotary_factor
    _require_one_of("partial_rotary_factor", partial, SUPPORTED_VALUES["partial_rotary_factor"])
    scaling = rope.rope_type or rope.type or "default"
    _require_one_of("rope type", scaling, tuple(_ROPE_KEYS))
    values = {key: getattr(rope, key) for key in _ROPE_KEYS[scaling]}
    for key, value in values.items():
        _require(value is not None, f"rope type {scaling!r} needs {key}")
    if scaling == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        _require(low < high, f"low_freq_factor {low} must be below high_freq_factor {high}")
        values["original_max_position"] = (
            fields.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or fields.max_position_embeddings
        )
    return RopeConfig(theta=rope.rope_theta or fields.rope_theta or 10_000.0, scaling=scaling, **values)


def _max_position(fields: _Fields, rope: RopeConfig) -> int:
    """The context length in tokens. Linear scaling leaves ``max_position_embeddings`` at what it stretches."""
    stretch = rope.factor if rope.scaling == "linear" else 1.0
    return int(fields.max_position_embeddings * stretch)


def _sliding_windows(fields: _Fields) -> tuple[int | None, ...]:
    layers = fields.num_hidden_layers
    if fields.layer_types is None:
        slides = [layer >= fields.max_window_layers for layer in range(layers)]
    else:
        for layer_type in fields.layer_types:
            _require_one_of("layer_types", layer_type, LAYER_TYPES)
        slides = [layer_type == "sliding_attention" for layer_type in fields.layer_types]
        _require(len(slides) == layers, f"layer_types has {len(slides)} entries for {layers} layers")
    window = fields.sliding_window if fields.use_sliding_window else None
    _require(
        window is not None or fields.layer_types is None or not any(slides),
        "layer_types asks for sliding_attention, but no sliding window is in use",
    )
    return tuple(window if layer else None for layer in slides) if window and any(slides) else ()


def _eos_token_ids(directory: Path, fields: _Fields) -> tuple[int, ...]:
    """``generation_config.json``'s, else ``config.json``'s."""
    path = directory / "generation_config.json"
    generation = read_json(path, _Eos) if path.is_file() else _Eos()
    eos = fields.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return ()
    ids = tuple(dict.fromkeys(eos if isinstance(eos, list) else [eos]))
    _require(min(ids, default=0) >= 0, f"eos_token_id has {min(ids, default=0)}, which is no token")
    _require(len(ids) <= MAX_EOS_TOKEN_IDS, f"eos_token_id has {len(ids)} ids, and {MAX_EOS_TOKEN_IDS} are most")
    return ids
