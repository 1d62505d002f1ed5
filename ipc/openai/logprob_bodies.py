"""Log-probabilities as OpenAI's clients are answered them."""

from msgspec import Struct

from driver.request import Logprob
from ipc.openai.answer_format import AnswerFormat
from ipc.wire.completion import TokenLogprobs


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


def text_logprobs(
    tokens: list[TokenLogprobs], answer_format: AnswerFormat, offset: int = 0, *, first: str | None = None
) -> TextLogprobs:
    """A text's log-probabilities, from ``offset`` characters on; a token ``first`` has none."""
    unknown = [None] if first is not None else []
    own = [next(iter(token.items())) for token in tokens]
    texts = ([] if first is None else [first]) + [_text(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return TextLogprobs(
        tokens=texts[: len(unknown)] + [_name(token_id, one, answer_format) for token_id, one in own],
        token_logprobs=[*unknown, *(one.logprob for _, one in own)],
        top_logprobs=[
            *unknown,
            *({_name(*one, answer_format): one[1].logprob for one in token.items()} for token in tokens),
        ],
        text_offset=offsets,
    )


def text_length(tokens: list[TokenLogprobs]) -> int:
    """Characters of the tokens' own texts, by which ``text_offset`` counts."""
    return sum(len(_text(token)) for token in tokens)


def _text(token: TokenLogprobs) -> str:
    return next(iter(token.values())).decoded_token or ""


def _chat_logprob(token: TokenLogprobs, answer_format: AnswerFormat) -> ChatLogprob:
    entries = [
        (one.rank, (_name(token_id, one, answer_format), one.logprob, _bytes(one))) for token_id, one in token.items()
    ]
    likeliest = [TopLogprob(*entry) for rank, entry in entries if rank <= answer_format.num_logprobs]
    return ChatLogprob(*entries[0][1], likeliest)


def _name(token_id: int, one: Logprob, answer_format: AnswerFormat) -> str:
    return f"token_id:{token_id}" if answer_format.tokens_as_ids else one.decoded_token or ""


def _bytes(one: Logprob) -> list[int]:
    """Those of the token itself, also where they are only a part of a character."""
    return list((one.decoded_token or "").encode() if one.token_bytes is None else one.token_bytes)
