"""The bytes that a token of a vocabulary stands for, where they are no text by themselves."""

import re
from functools import cache

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of byte fallback."""


@cache
def byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself if visible, else the next from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(unseen)}


def token_bytes(token: str) -> bytes | None:
    """Those of a token of byte fallback, or of a byte-level vocabulary; None for any other."""
    if (byte := BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    letters = byte_letters()
    return bytes([letters[letter] for letter in token]) if letters.keys() >= set(token) else None
