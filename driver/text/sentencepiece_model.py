"""SentencePiece's ``tokenizer.model``, read without its library, as a tokenizer.json.

The file is a protocol buffer, ``ModelProto`` of sentencepiece_model.proto; the numbers of the
fields that matter are below.
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from driver.text.byte_pairs import added_tokens

UNIGRAM, BPE = 1, 2
"""TrainerSpec.model_type."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""SentencePiece.type."""
SPACE = "\u2581"
NEVER = -1e6
"""A score that a text of known characters does not get otherwise."""


class Piece(NamedTuple):
    """A token, the better the higher its ``score``."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """The parts of a ModelProto from which text is tokenised."""

    pieces: list[Piece]
    model_type: int
    byte_fallback: bool
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    bos_id: int
    eos_id: int


def parsed(data: bytes) -> SentencePieceModel:
    """Raises ValueError for what is none."""
    try:
        model = _fields(data)
        pieces = [_piece(_fields(piece)) for piece in model.get(1, [])]
        trainer, normalizer = (_fields(model[number][-1]) if number in model else {} for number in (2, 3))
    except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no SentencePiece model: {error}") from error
    if not pieces:
        raise ValueError("it is no SentencePiece model: it has no pieces")
    return SentencePieceModel(
        pieces,
        model_type=_last(trainer, 3, UNIGRAM),
        byte_fallback=bool(_last(trainer, 35, 0)),
        precompiled_charsmap=_last(normalizer, 2, b""),
        add_dummy_prefix=bool(_last(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_last(normalizer, 4, 1)),
        bos_id=_signed(_last(trainer, 41, 1)),
        eos_id=_signed(_last(trainer, 42, 2)),
    )


def _piece(fields: dict[int, list[Any]]) -> Piece:
    (score,) = struct.unpack("<f", _last(fields, 2, bytes(4)))
    return Piece(_last(fields, 1, b"").decode(), score, _last(fields, 3, NORMAL))


def _last(fields: dict[int, list[Any]], number: int, default: Any) -> Any:
    return fields[number][-1] if number in fields else default


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message by number: integers, or bytes."""
    fields: dict[int, list[Any]] = {}
    for number, value in _walk(data):
        fields.setdefault(number, []).append(value)
    return fields


def _walk(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        match key & 7:
            case 0:
                value, place = _varint(data, place)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, place = _varint(data, place)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"it is no SentencePiece model: it has a field of type {kind}")
        if place + size > len(data):
            raise ValueError("it is no SentencePiece model, or it is cut off")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError("it is no SentencePiece model: it has a number of more than 64 bits")


def as_tokenizer(model: SentencePieceModel, renamed: dict[int, str], *, legacy: bool) -> dict[str, Any]:
    """A tokenizer.json of it; tokens of the ids in ``renamed`` are new, or stand for others.

    A text begins with a space where the model has it so; ``legacy`` puts one after each special
    token as well, as transformers' setting of that name. Raises ValueError for models of words or
    characters.
    """
    if model.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"it is a SentencePiece model of type {model.model_type}: BPE and Unigram can be read")
    pieces = [piece._replace(text=renamed.get(place, piece.text)) for place, piece in enumerate(model.pieces)]
    last = max(renamed, default=-1)
    new = range(len(pieces), last + 1)
    pieces += [Piece(renamed.get(place, f"<unused_{place}>"), 0.0, CONTROL) for place in new]
    special, defined = (
        {piece.text: place for place, piece in enumerate(pieces) if piece.kind in kinds or (is_special and place in renamed)}
        for kinds, is_special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False))
    )  # fmt: skip
    defined = {text: place for text, place in defined.items() if text not in special}
    starts = model.add_dummy_prefix
    return {
        "added_tokens": [*added_tokens(special), *added_tokens(defined, special=False)],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, prepends=starts and legacy)},
        "pre_tokenizer": _first_space() if starts and not legacy else None,
        "decoder": {"type": "Sequence", "decoders": _decoders(strips=starts)},
        "post_processor": None,
        "model": _unigram(model, pieces) if model.model_type == UNIGRAM else _bpe(model, pieces),
    }


def _first_space() -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


def _normalizers(model: SentencePieceModel, *, prepends: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if model.precompiled_charsmap:
        charsmap = base64.b64encode(model.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if model.remove_extra_whitespaces:
        steps += [
            {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
            for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " "))
        ]
    if prepends:
        steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _decoders(*, strips: bool) -> list[dict[str, Any]]:
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else steps


def _unknown(pieces: list[Piece]) -> int:
    return next((place for place, piece in enumerate(pieces) if piece.kind == UNKNOWN), 0)


def _unigram(model: SentencePieceModel, pieces: list[Piece]) -> dict[str, Any]:
    """Bytes have a score with which the text "<0x41>" is six characters, and no byte, if the model knows those."""
    pieces = [piece._replace(score=NEVER) if piece.kind == BYTE else piece for piece in pieces]
    return {
        "type": "Unigram",
        "unk_id": _unknown(pieces),
        "vocab": [[piece.text, piece.score] for piece in pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel, pieces: list[Piece]) -> dict[str, Any]:
    """Merges in the order of the scores of what they make."""
    ids = {piece.text: place for place, piece in enumerate(pieces)}
    scores = {piece.text: piece.score for piece in pieces if piece.kind in (NORMAL, UNUSED)}
    merges = []
    for text in sorted(scores, key=lambda text: -scores[text]):
        splits = ((text[:place], text[place:]) for place in range(1, len(text)))
        known = [(left, right) for left, right in splits if left in scores and right in scores]
        merges += sorted(known, key=lambda split: (ids[split[0]], ids[split[1]]))
    return {
        "type": "BPE",
        "vocab": ids,
        "merges": merges,
        "unk_token": pieces[_unknown(pieces)].text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
    }
