"""The files of a model that are small: what it is, how it writes, and where its weights are."""

from fnmatch import fnmatch
from pathlib import Path

from engine.models.weights.published.formats import MODELOPT_FILE
from engine.models.weights.sources.checkpoint import INDEX_FILE
from engine.models.weights.sources.easydel import TENSORSTORE_INDEX

TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "tekken.json", "tiktoken.model", "*.tiktoken", "tokenizer.model*", "vocab.json")
"""What a tokenizer is made from: the first of these that a directory has."""
NO_VOCABULARY = (
    f"has no {TOKENIZER}, tekken.json, tokenizer.model or *.tiktoken: name a model that has one with --tokenizer"
)
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
SMALL_FILES = ("config.json", "generation_config.json", MODELOPT_FILE, INDEX_FILE, TENSORSTORE_INDEX, *TOKENIZER_FILES)
"""Data alone: neither pickles nor code."""


def is_small(name: str) -> bool:
    """Whether a file of this name, in a model's directory, is one of them."""
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES)


def vocabulary_file(directory: Path) -> Path | None:
    """The file from which its tokenizer is made, if it has one."""
    found = (path for pattern in VOCABULARIES for path in sorted(directory.glob(pattern)))
    return next(found, None)
