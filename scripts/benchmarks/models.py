"""The models that are measured: random weights of seed 0, written once as Hugging Face directories."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from caching.cache_directory import cache_home

SEED = 0
VOCABULARY = 32000
END = "<|end|>"
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
MAX_POSITION = 4096
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]


Draw = Callable[[np.random.Generator, str, tuple[int, ...]], np.ndarray]
"""A tensor in float32, by its name and shape."""


class ModelShape(Protocol):
    """What is written of a model."""

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer."""

    def config(self) -> dict[str, object]:
        """config.json."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, linear ones as [out, in]."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a decoder in Llama's layout, whose head is its embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See ModelShape."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)

    def config(self) -> dict[str, object]:
        """See ModelShape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        }

    @property
    def linear_parameters(self) -> int:
        """Parameters of the layers' matrices, of which a token costs two FLOP each."""
        return self.layers * sum(shape[0] * shape[1] for _, shape in self._layer() if len(shape) == 2)

    @property
    def parameters(self) -> int:
        """All parameters; a decode step reads each once, the embedding as the head."""
        return sum(int(np.prod(shape)) for _, shape in self.tensors())

    def decode_flop(self, rows: int) -> int:
        """FLOP of the matrices in a step of one token for each row."""
        return 2 * rows * (self.linear_parameters + self.vocabulary * self.hidden)

    def prefill_flop(self, tokens: int) -> int:
        """FLOP of a prompt: matrices, causal attention, and the head for its last token."""
        attention = 2 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1)
        return 2 * tokens * self.linear_parameters + attention + 2 * self.vocabulary * self.hidden

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "input_layernorm", (self.hidden,)
        yield "self_attn.q_proj", (q, self.hidden)
        yield "self_attn.k_proj", (kv, self.hidden)
        yield "self_attn.v_proj", (kv, self.hidden)
        yield "self_attn.o_proj", (self.hidden, q)
        yield "post_attention_layernorm", (self.hidden,)
        yield "mlp.gate_proj", (self.ffn, self.hidden)
        yield "mlp.up_proj", (self.ffn, self.hidden)
        yield "mlp.down_proj", (self.hidden, self.ffn)


SIZES = {
    "tiny": Size(hidden=288, layers=6, heads=6, kv_heads=6, ffn=768),
    "small": Size(hidden=768, layers=12, heads=12, kv_heads=4, ffn=2048),
}


def models_directory() -> Path:
    """Where they are kept: ``odriver/bench-models`` in XDG_CACHE_HOME or ~/.cache."""
    return cache_home() / "bench-models"


def model_directory(model: str) -> Path:
    """The directory of a model of SIZES, made if need be, or the path given."""
    if model not in SIZES:
        return Path(model)
    return written(model, SIZES[model])


def written(name: str, shape: ModelShape, draw: Draw | None = None) -> Path:
    """The directory of a model, made if need be."""
    directory = models_directory() / name
    if not directory.exists():
        write_model(directory, shape, draw)
    return directory


def size_of(directory: Path) -> Size:
    """The sizes in a config.json, as if its head were tied."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return Size(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
    )


def write_model(directory: Path, shape: ModelShape, draw: Draw | None = None) -> None:
    """A whole model directory, with weights that ``draw`` draws; it appears at once, or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
    try:
        _write_json(unfinished / "config.json", shape.config())
        _write_json(unfinished / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
        write_weights(unfinished / "model.safetensors", shape, draw or random_tensor)
        tokenizer(shape.vocabulary).save(str(unfinished / "tokenizer.json"))
        _write_json(unfinished / "tokenizer_config.json", TOKENIZER_CONFIG)
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_weights(path: Path, shape: ModelShape, draw: Draw) -> None:
    """A safetensors file in float32, a tensor at a time: a length, a JSON header with places, and the bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in shape.tensors():
        begin, end = end, end + 4 * int(np.prod(sizes))
        header[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(SEED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, sizes in shape.tensors():
            file.write(draw(rng, name, sizes).data)


def tokenizer(vocabulary: int) -> Tokenizer:
    """Every byte, an end mark, and words of a made-up language up to ``vocabulary`` entries.

    Text is encoded as bytes, as there are no merges; ids of words decode as words, as those of a real vocabulary do.
    """
    entries = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"Ġ{_word(number)}" for number in range(vocabulary - len(entries))]
    backend = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return backend


def _word(number: int) -> str:
    number, last = divmod(number, len(_SYLLABLES))
    first, middle = divmod(number, len(_SYLLABLES))
    return _SYLLABLES[first] + _SYLLABLES[middle] + _SYLLABLES[last]


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms of one; what multiplies keeps the size of what it is given, and embeddings have the usual 0.02."""
    del name
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(min(0.02, shape[1] ** -0.5))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
