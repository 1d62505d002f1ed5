"""Vocabularies that list the bytes of their tokens by rank: tekken.json, and tiktoken's files.

Their encoding merges the adjacent pair whose bytes are the token of the lowest rank. Here each
token is spelt in GPT-2's letters, and every way to split it in two others is a merge, in the order
of ranks: the ``tokenizers`` library's BPE then merges the same.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from driver.text.token_bytes import byte_letters

LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama": LLAMA_PATTERN, "glm": LLAMA_PATTERN, "qwen": LLAMA_PATTERN.replace("{1,3}", "")}
"""How a family, by the beginning of its ``model_type``, cuts text into words: tiktoken's files do
not say it."""
_RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(248)]
_LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:2], "<|finetune_right_pad_id|>", _RESERVED[2]]
_LLAMA += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_RESERVED[3:]]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
SPECIAL_TOKENS = {"llama": _LLAMA, "qwen": _QWEN}
"""Those that follow the file's tokens where no tokenizer_config.json lists them."""
_TEKKEN_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
"""Of the tekken.json that list none."""
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")


def is_tiktoken(path: Path) -> bool:
    """Whether its first line is base64 and a rank, which a SentencePiece model is not."""
    with path.open("rb") as file:
        return _LINE.fullmatch(file.readline(1024).strip()) is not None


def read_tekken(path: Path) -> dict[str, Any]:
    """Mistral's tekken.json as a tokenizer.json. Raises ValueError and KeyError for a wrong one."""
    given = json.loads(path.read_text(encoding="utf-8"))
    config = given["config"]
    listed = given.get("special_tokens")
    names = dict(enumerate(_TEKKEN_SPECIAL)) if listed is None else {row["rank"]: row["token_str"] for row in listed}
    num_special = config.get("default_num_special_tokens") or len(names)
    special = {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(num_special)}
    num_tokens = config["default_vocab_size"] - num_special
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in given["vocab"][:num_tokens]}
    return byte_level(ranks, config["pattern"], special, first_id=num_special)


def read_tiktoken(path: Path, model_type: str, added: Mapping[str, int]) -> dict[str, Any]:
    """A file of tiktoken as a tokenizer.json, with these special tokens or the family's own.

    Raises ValueError for a wrong file, and for a family whose files are not known.
    """
    family = next((family for family in PATTERNS if model_type.startswith(family)), None)
    if family is None or not (added or family in SPECIAL_TOKENS):
        known = ", ".join(PATTERNS)
        raise ValueError(
            f"files of tiktoken are known for {known}, with special tokens in tokenizer_config.json, and not for"
            f" {model_type or 'a model without config.json'}: name a directory with its tokenizer.json with --tokenizer"
        )
    lines = path.read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line.strip())}
    if not added:
        added = {token: len(ranks) + place for place, token in enumerate(SPECIAL_TOKENS[family])}
    return byte_level(ranks, PATTERNS[family], added)


def byte_level(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], first_id: int = 0
) -> dict[str, Any]:
    """A tokenizer.json in which the ids of tokens are their ranks from ``first_id`` on."""
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"the byte {missing[0]} is no token")
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelt = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocabulary = {spelt[token]: first_id + rank for token, rank in ranks.items()}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "added_tokens": added_tokens(special),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, as_bytes]},
        "decoder": as_bytes,
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": vocabulary | dict(special),
            "merges": [[spelt[left], spelt[right]] for left, right in _merges(ranks)],
            "ignore_merges": True,
        },
    }


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        yield from sorted(known, key=lambda split: (ranks[split[0]], ranks[split[1]]))


def added_tokens(tokens: Mapping[str, int], *, special: bool = True) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut into words, as a tokenizer.json has them."""
    as_they_are = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": place, "content": token, "special": special, **as_they_are} for token, place in tokens.items()]
