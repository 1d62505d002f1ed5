"""Checks the form of a client's message, as bytes, before it is decoded.

Fields of any content (``messages``, ``tools``, ``chat_template_kwargs``, ``params``) are checked
here; ipc/wire/messages.py limits the length of all others.
"""

import math
from contextlib import suppress

import msgspec
from msgspec import Raw

from engine.request_limits import MAX_DEPTH, MAX_NAME_LENGTH, MAX_NAMES, MAX_VALUES

NO_MESSAGE = (ValueError, RecursionError)
"""msgspec raises its own errors, ValueError for bad UTF-8, RecursionError for deep nesting."""

_IDS = {"allowed_token_ids": list[int], "stop_token_ids": list[int], "logit_bias": dict[int, float]}
"""Parameters that hold token ids, which are many and small; their types limit how many."""
_decoder = msgspec.msgpack.Decoder(dict[str, Raw])


def check_message(frame: bytes) -> None:
    """Raises ValueError that names what is too deep, too many or too long."""
    fields, left = _named("the message", frame), MAX_VALUES
    for name in ("messages", "tools"):
        if name in fields:
            _, left = _skipped(name, bytes(fields[name]), 0, left, MAX_DEPTH - 1)
    for name in ("chat_template_kwargs", "params"):
        for inner, value in _named(name, bytes(fields.get(name, b""))).items():
            if len(inner) > MAX_NAME_LENGTH:
                raise ValueError(f"{name}: a name may have {MAX_NAME_LENGTH} characters, not {len(inner)}")
            if name != "params" or not _are_ids(inner, value):
                _, left = _skipped(f"{name}.{inner}", bytes(value), 0, left, MAX_DEPTH - 2)


def encoded_field(frame: bytes, name: str) -> bytes:
    """A field of a message, as bytes, however deeply others are nested; empty if it has none.

    Only the first MAX_VALUES values are searched.
    """
    if not frame or not _is_map(frame[0]):
        return b""
    key, left = msgspec.msgpack.encode(name), MAX_VALUES
    num_inside, position = _num_inside(frame, frame[0], 1)
    with suppress(IndexError, ValueError):  # it ends before its last value, or has too many
        for _ in range(num_inside // 2):
            begin, left = _skipped(name, frame, position, left)
            end, left = _skipped(name, frame, begin, left)
            if frame[position:begin] == key:
                return frame[begin:end]
            position = end
    return b""


def _is_map(lead: int) -> bool:
    return 0x80 <= lead < 0x90 or lead in (0xDE, 0xDF)


def _named(where: str, data: bytes) -> dict[str, Raw]:
    """The values of a map, as bytes; empty if it is no map, which others report.

    A name may come once: of two alike, all but the last would be built without having been
    checked.
    """
    if not data or not _is_map(data[0]):
        return {}
    count = _num_inside(data, data[0], 1)[0] // 2
    if count > MAX_NAMES:
        raise ValueError(f"{where}: it may have {MAX_NAMES} names, not {count}")
    try:
        named = _decoder.decode(data)
    except RecursionError:
        raise ValueError(_too_deep(where)) from None
    if len(named) < count:
        raise ValueError(f"{where}: a name is given twice")
    return named


def _are_ids(name: str, value: Raw) -> bool:
    kind = _IDS.get(name)
    if kind is not None:
        with suppress(*NO_MESSAGE):
            msgspec.msgpack.decode(value, type=kind)
            return True
    return False


def _too_deep(name: str) -> str:
    return f"{name}: it is nested too deeply: maps and lists may be {MAX_DEPTH} deep"


def _sizes() -> list[int]:
    """The size in bytes of a value, by its first byte; 0 where its header says, below 0 for maps
    and lists.

    From the msgpack specification: https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    sizes = [1] * 256
    sizes[0x80:0xA0] = [-1] * 32
    sizes[0xA0:0xC0] = range(1, 33)
    for lead in (*range(0xC4, 0xCA), 0xD9, 0xDA, 0xDB):
        sizes[lead] = 0
    for lead, size in {
        0xCA: 5,
        0xCB: 9,
        0xCC: 2,
        0xCD: 3,
        0xCE: 5,
        0xCF: 9,
        0xD0: 2,
        0xD1: 3,
        0xD2: 5,
        0xD3: 9,
    }.items():
        sizes[lead] = size
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]
    sizes[0xDC:0xE0] = [-1] * 4
    return sizes


_SIZES = _sizes()
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_LENGTHS |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""For binaries, extensions and strings: the bytes of their length, and of their type."""


def _skipped(name: str, data: bytes, position: int, most: int, depth: float = math.inf) -> tuple[int, int]:
    """Where the value at a position ends, and what is left of ``most`` values, keys included; raises
    ValueError beyond them or ``depth``, and IndexError beyond the data."""
    left = 1
    outer: list[int] = []
    """Values left in each map and list around the innermost, which has ``left``."""
    while True:
        while not left:
            if not outer:
                return position, most
            left = outer.pop()
        if not most:
            raise ValueError(f"{name}: a message may have {MAX_VALUES} values in all, besides token ids")
        left, most = left - 1, most - 1
        lead = data[position]
        size = _SIZES[lead]
        if size > 0:
            position += size
        elif size == 0:
            position = _end_of_bytes(data, lead, position)
        else:
            if len(outer) == depth:
                raise ValueError(_too_deep(name))
            outer.append(left)
            left, position = _num_inside(data, lead, position + 1)


def _end_of_bytes(data: bytes, lead: int, position: int) -> int:
    """Where a binary, an extension or a string ends."""
    width, kind = _LENGTHS[lead]
    start = position + 1 + width
    return start + kind + int.from_bytes(data[position + 1 : start], "big")


def _num_inside(data: bytes, lead: int, position: int) -> tuple[int, int]:
    """How many values a map or a list has, keys included, and where they begin."""
    if lead < 0xA0:
        return (2 * (lead & 0x0F) if lead < 0x90 else lead & 0x0F), position
    end = position + (2 if lead in (0xDC, 0xDE) else 4)
    return int.from_bytes(data[position:end], "big") * (2 if lead >= 0xDE else 1), end
