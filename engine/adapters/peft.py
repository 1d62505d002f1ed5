"""adapter_config.json and the names of tensors in the format of Hugging Face's PEFT.

What an adapter was trained with is ignored where it changes nothing that is computed now. All else
that is not served is refused by its name, so that no adapter is ever served in part.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any, TypeVar

import msgspec

from engine.adapters.adapter import AdapterError
from engine.adapters.patterns import check_pattern, matched
from engine.adapters.targets import Targets
from engine.models.weights.sources.text_part import TEXT_PREFIXES, text_name

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {
    ".lora_A.weight": ("a", False),
    ".lora_B.weight": ("b", False),
    ".lora_embedding_A": ("a", True),
    ".lora_embedding_B": ("b", True),
}
"""By the end of a tensor's name, the factor, and whether it is an embedding's."""
BASE = ".base_layer"
"""Behind a module's name: the module that an adapter was put around."""
TRAINING = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "velora_config", "monteclora_config", "qalora_group_size"),
        *("runtime_config", "ephemeral_gpu_offload"),
    }
)
"""Options that change nothing of what is computed with the tensors of the file."""
KEEPS_BASE = ("gaussian", "eva", "orthogonal")
"""Names of ``init_lora_weights``, in lower case, that leave the weights of the model below the adapter as they are.
Those of pissa, olora, corda, loftq and lora_ga change them, and so may any other."""
NAMINGS: tuple[Mapping[str, str], ...] = (
    {},
    *(
        {plain: beside for beside, plain in naming}
        for _, naming in groupby(TEXT_PREFIXES.items(), lambda item: item[0].partition(".")[0])
    ),
    {"model.": "backbone."},
    {"lm_head.": "embed_out."},
)
"""Of each way to name a text model's weights the prefixes that it has for plain ones. GPT-NeoX's head has either
name: checkpoints and transformers 4 have the older."""
Number = TypeVar("Number", int, float)


class PeftConfig(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that says how factors are multiplied."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    ensure_weight_tying: bool = False
    """The head of a model with tied embeddings has the embedding's adapter."""
    targets: Targets = Targets()

    def rank(self, module: str) -> int:
        """The rank of a module, such as ``model.layers.0.self_attn.q_proj``."""
        return _matching(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """The number that the product of its factors is multiplied by."""
        rank, alpha = self.rank(module), _matching(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


@dataclass(frozen=True)
class Named:
    """A factor in the file."""

    stored: str
    module: str
    """As PEFT calls the module that has it."""
    factor: str
    """``a`` or ``b``."""
    is_embedding: bool


def read_config(origin: str, content: bytes) -> PeftConfig:
    """The configuration of an adapter that can be served. Raises AdapterError."""
    try:
        options = msgspec.json.decode(content, type=dict[str, Any])
        targets = msgspec.convert(options, Targets)
        config = msgspec.convert(options | {"targets": targets}, PeftConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AdapterError(f"{origin}: {CONFIG_FILE} cannot be read: {error}") from error
    if config.peft_type != "LORA":
        raise AdapterError(f"{origin}: peft_type is {config.peft_type}: LORA alone is served")
    if config.r < 1 or any(rank < 1 for rank in (config.rank_pattern or {}).values()):
        raise AdapterError(f"{origin}: a rank must be at least 1")
    numbers = (config.lora_alpha, *(config.alpha_pattern or {}).values())
    if not all(map(math.isfinite, numbers)):
        raise AdapterError(f"{origin}: lora_alpha must be a finite number")
    _check_patterns(origin, config)
    for name, value in options.items():
        if (fault := _unserved(name, value)) is not None:
            raise AdapterError(f"{origin}: {fault}")
    return config


def named(origin: str, stored: str) -> Named:
    """What a tensor of the file is. Raises AdapterError if it is no factor of an adapter."""
    for ending, (factor, is_embedding) in FACTORS.items():
        if stored.startswith(PREFIX) and stored.endswith(ending):
            module = stored.removeprefix(PREFIX).removesuffix(ending)
            return Named(stored, module, factor, is_embedding)
    why = "is no factor of an adapter"
    if "lora_magnitude" in stored:
        why = "is of DoRA, which is not served"
    elif stored.endswith(".bias"):
        why = "is a bias (lora_bias, or bias), which is not served"
    raise AdapterError(f"{origin}: {stored} {why}")


def table_copy(stored: str) -> str | None:
    """The module of which a tensor is a copy: PEFT saves tables beside their adapters."""
    ending = f"{BASE}.weight"
    is_copy = stored.startswith(PREFIX) and stored.endswith(ending)
    return stored.removeprefix(PREFIX).removesuffix(ending) if is_copy else None


def weight_name(name: str) -> str:
    """A weight of the text model, alike in all checkpoints and in transformers itself."""
    plain = re.sub(r"^backbone\.", "model.", re.sub(r"^embed_out\.", "lm_head.", text_name(name)))
    return re.sub(r"\.block_sparse_moe\.(?=experts|gate\.)", ".mlp.", plain)


def spellings(name: str) -> list[str]:
    """What a weight is called, by ``weight_name``, in each naming of a model's weights."""
    called = [_with_prefix(name, naming) for naming in NAMINGS]
    return [*called, *(one.replace(".mlp.", ".block_sparse_moe.") for one in called)]


def namings_of(weights: Iterable[str]) -> Callable[[str], list[str]]:
    """``spellings`` in the namings alone that all of these weights of one model are called by.

    They are of all namings if there is none: nothing is known then.
    """
    every = [[one == weight for one in spellings(weight_name(weight))] for weight in weights]
    fitting = [all(fits) for fits in zip(*every, strict=True)]
    return (lambda name: list(compress(spellings(name), fitting))) if any(fitting) else spellings


def _with_prefix(name: str, naming: Mapping[str, str]) -> str:
    plain = next((plain for plain in naming if name.startswith(plain)), "")
    return naming.get(plain, "") + name.removeprefix(plain)


def _unserved(name: str, value: object) -> str | None:
    """Why an option cannot be served, in words."""
    known = name in PeftConfig.__struct_fields__ or name in Targets.__struct_fields__
    if name in TRAINING or known or not value:
        return None
    if name == "bias":
        return None if value == "none" else f"bias {value} is not served: none is"
    if name == "init_lora_weights":
        keeps = value is True or (isinstance(value, str) and value.lower() in KEEPS_BASE)
        wish = "save it as an adapter of the unchanged model (PEFT's path_initial_model_for_weight_conversion)"
        return None if keeps else f"init_lora_weights {value} may change the model's own weights: {wish}"
    return f"{name} {value} is not served"


def _check_patterns(origin: str, config: PeftConfig) -> None:
    for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {}), *config.targets.expressions):
        check_pattern(origin, pattern)


def _matching(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that a module's name ends with, as PEFT matches them."""
    found = next((key for key in patterns if matched(rf"(.*\.)?({key})$", module)), None)
    return default if found is None else patterns[found]
