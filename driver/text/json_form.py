"""Whether JSON is of a form that can be read: looked at as bytes, before anything is built of it."""

import numpy as np

from engine.request_limits import MAX_DEPTH, MAX_VALUES

_ALL_ELSE = bytes(set(range(256)) - set(b'{}[]"'))


def check_json(json: bytes) -> None:
    """Raises ValueError for more than MAX_VALUES maps and lists, or more than MAX_DEPTH within one another.

    What is no JSON may pass. It takes milliseconds for megabytes, and no recursion.
    """
    if json.count(b"[") + json.count(b"{") <= MAX_DEPTH:
        return
    unescaped = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(unescaped.translate(None, _ALL_ELSE), np.uint8)
    quotes = characters == ord('"')
    brackets = characters[~(quotes | np.logical_xor.accumulate(quotes))]  # those that are not within strings
    opened = (brackets == ord("[")) | (brackets == ord("{"))
    if (count := int(opened.sum())) > MAX_VALUES:
        raise ValueError(f"{count} maps and lists are too many: there may be {MAX_VALUES}")
    if np.where(opened, 1, -1).cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
        raise ValueError(f"it is nested too deeply: maps and lists may be {MAX_DEPTH} deep")
