"""Log-probabilities as OpenAI's clients are answered them."""

import codecs

from msgspec import Struct

from driver.request import Logprob
from ipc.openai.answer_format import AnswerFormat
from ipc.wire.completion import TokenLogprobs

_CONTINUING = bytes(range(0x80, 0xC0))
"""Bytes that continue a character in UTF-8."""


class TopLogprob(Struct, frozen=True):
    """A token, and the bytes of its text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    """A token with its log-probability, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """An entry for each token."""

    content: list[ChatLogprob]


class TextLogprobs(Struct, frozen=True):
    """An entry for each token; with ``echo`` the prompt's come first, of which one has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokens: list[TokenLogprobs], answer_format: AnswerFormat) -> ChatLogprobs:
    """A chat's log-probabilities."""
    return ChatLogprobs([_chat_logprob(token, answer_format) for token in tokens])


class TextPlace:
    """A place in a text, in characters, which goes on behind the tokens of it.

    Of a character in several tokens the first has it, and of bytes that are no UTF-8 each has a
    character of its own. Where the text begins with a part of its tokens alone, ``start`` is negative.
    """

    def __init__(self, start: int = 0) -> None:
        self.end = start
        self._whole = start
        """Where the last character that is whole ends."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._goes_on = False
        """Whether the next bytes may be the rest of a character of which it has passed the beginning."""

    def pass_text(self, text: str) -> None:
        """Go behind a token of which there is only the text."""
        self._whole = self.end = self.end + len(text)
        self._goes_on = text.endswith("\ufffd")

    def pass_tokens(self, tokens: list[TokenLogprobs]) -> list[int]:
        """Go behind these; returns where each ends."""
        ends = []
        for token in tokens:
            own = _own_bytes(token)
            if self._goes_on:
                own = own.lstrip(_CONTINUING)
                self._goes_on = not own
            self._whole += len(self._decoder.decode(own))
            begun, _ = self._decoder.getstate()
            self.end = self._whole + bool(begun)
            ends.append(self.end)
        return ends


def text_logprobs(
    tokens: list[TokenLogprobs],
    answer_format: AnswerFormat,
    place: TextPlace | None = None,
    *,
    first: str | None = None,
) -> TextLogprobs:
    """A text's log-probabilities, from a ``place`` on, which goes behind them; a token ``first`` has none."""
    unknown = [None] if first is not None else []
    own = [next(iter(token.items())) for token in tokens]
    place = place or TextPlace()
    starts = [place.end]
    if first is not None:
        place.pass_text(first)
        starts.append(place.end)
    starts += place.pass_tokens(tokens)
    return TextLogprobs(
        tokens=([] if first is None else [first]) + [_name(token_id, one, answer_format) for token_id, one in own],
        token_logprobs=[*unknown, *(one.logprob for _, one in own)],
        top_logprobs=[*unknown, *(_by_name(token, answer_format) for token in tokens)],
        text_offset=[max(0, start) for start in starts[:-1]],
    )


def text_of(tokens: list[TokenLogprobs]) -> str:
    """Their own texts together."""
    return b"".join(map(_own_bytes, tokens)).decode(errors="replace")


def _own_bytes(token: TokenLogprobs) -> bytes:
    return bytes(_bytes(next(iter(token.values()))))


def _chat_logprob(token: TokenLogprobs, answer_format: AnswerFormat) -> ChatLogprob:
    entries = [
        (one.rank, (_name(token_id, one, answer_format), one.logprob, _bytes(one))) for token_id, one in token.items()
    ]
    # the token's own is first, and is left out if it is none of the likeliest
    likeliest = sorted(entries[max(0, len(entries) - answer_format.num_logprobs) :], key=lambda entry: entry[0])
    return ChatLogprob(*entries[0][1], [TopLogprob(*entry) for _, entry in likeliest])


def _by_name(token: TokenLogprobs, answer_format: AnswerFormat) -> dict[str, float]:
    """The log-probabilities of a place. Of tokens of one text the first one, which is the likeliest
    if it is not the token itself, has it for a name, and others have their bytes, as OpenAI writes these, or where they
    have none their ids."""
    named: dict[str, float] = {}
    for token_id, one in token.items():
        name = _name(token_id, one, answer_format)
        if name in named:
            own = "".join(f"\\x{byte:02x}" for byte in _bytes(one))
            name = f"bytes:{own}" if own else _id_name(token_id)
        named.setdefault(name, one.logprob)
    return named


def _name(token_id: int, one: Logprob, answer_format: AnswerFormat) -> str:
    """Its text, or vLLM's name of its id where that is asked for, or nothing is made text."""
    return _id_name(token_id) if answer_format.tokens_as_ids or one.decoded_token is None else one.decoded_token


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _bytes(one: Logprob) -> list[int]:
    """Those of the token itself, also where they are only a part of a character."""
    return list((one.decoded_token or "").encode() if one.token_bytes is None else one.token_bytes)
