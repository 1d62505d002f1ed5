"""A lower bound on the tokens of a text, to refuse in milliseconds what cannot fit.

A token of n bytes covers n bytes of the text, so each byte costs at least 1/n of a token, where n
is the length of the longest token with such a byte. The bound is the sum over the bytes. It holds
for a tokenizer that puts each byte of its input into exactly one token: byte-level BPE, and BPE or
Unigram with byte fallback. Its input is the text after Unicode normalization, which may shorten
it, and without the whitespace that added tokens strip. For any other kind of tokenizer or
normalizer the bound is 0.
"""

import json
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from driver.text.token_bytes import BYTE_TOKEN, byte_letters

_KEEPS_ALL = frozenset(["ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"])
"""Pre-tokenizers that drop no text, unless their behavior is "Removed"."""
_LETTERS = {code: byte_letters().get(chr(code)) for code in range(0x100)} | {
    ord(letter): byte for letter, byte in byte_letters().items()
}
"""For ``str.translate``: the byte of each letter of a byte-level vocabulary; others of latin-1 stand for none."""
_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


class LeastTokens:
    """The bound for the tokenizer of this tokenizer.json. For any thread."""

    def __init__(self, tokenizer_json: str) -> None:
        definition = json.loads(tokenizer_json)
        kinds = [step["type"] for step in _steps(definition["normalizer"], "normalizers")]
        self._forms = [form for form in _FORMS if form in kinds]
        self._strips = any(token["lstrip"] or token["rstrip"] for token in definition["added_tokens"])
        self._cost = 1 / _longest(definition) if _loses_nothing(definition) else np.zeros(256)

    def at_least(self, text: str) -> int:
        """The bound; raises UnicodeEncodeError for text that UTF-8 cannot carry."""
        seen = text
        for form in self._forms:
            seen = unicodedata.normalize(form, seen)
        if self._strips:
            seen = "".join(seen.split())
        counts = np.bincount(np.frombuffer(seen.encode(), np.uint8), minlength=256)
        return int(np.ceil(counts @ self._cost - 1e-6))


def _loses_nothing(definition: dict[str, Any]) -> bool:
    """Whether each byte of the tokenizer's input is in exactly one token."""
    model = definition["model"]
    pre_tokenizers = list(_steps(definition["pre_tokenizer"], "pretokenizers"))
    if not all(step["type"] in _KEEPS_ALL and step.get("behavior") != "Removed" for step in pre_tokenizers):
        return False
    if not all(_keeps_length(step) for step in _steps(definition["normalizer"], "normalizers")):
        return False
    vocabulary = _tokens(definition)
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return model["type"] == "BPE" and _is_byte_level(definition) and vocabulary.issuperset(byte_letters())


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Whether it removes no byte, or is a Unicode normalization, done in ``at_least``."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"} | {"type": "Prepend"}:
            return True
    return normalizer["type"] in _FORMS


def _longest(definition: dict[str, Any]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """For each byte, the length of the longest token that has it, or infinity."""
    longest, missing = np.full(256, np.inf), set(range(256))
    letters = _LETTERS if _is_byte_level(definition) else None
    added = {token["content"] for token in definition["added_tokens"]}
    spelt = [_spelt(token, None if token in added else letters) for token in _tokens(definition) | added]
    for token in sorted(spelt, key=len, reverse=True):
        if not missing.isdisjoint(token):
            longest[list(missing.intersection(token))] = len(token)
            missing.difference_update(token)
    return longest


def _spelt(token: str, letters: dict[int, int | None] | None) -> bytes:
    """The bytes of the text that a token may stand for, or more."""
    if letters is not None:
        spelt = token.translate(letters).encode("latin-1", errors="ignore")
    else:
        spelt = token.encode(errors="replace") + (b" " if "\u2581" in token else b"")
    byte = BYTE_TOKEN.fullmatch(token)
    return spelt if byte is None else spelt + bytes([int(byte[1], 16)])


def _tokens(definition: dict[str, Any]) -> set[str]:
    vocabulary = definition["model"]["vocab"]
    return {token if isinstance(token, str) else token[0] for token in vocabulary}


def _is_byte_level(definition: dict[str, Any]) -> bool:
    """Whether the model sees a letter for each byte."""
    return any(step["type"] == "ByteLevel" for step in _steps(definition["pre_tokenizer"], "pretokenizers"))


def _steps(step: dict[str, Any] | None, inside: str) -> Iterable[dict[str, Any]]:
    """A normalizer or a pre-tokenizer, or those of which it is a sequence."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[inside]:
            yield from _steps(part, inside)
    else:
        yield step
