"""What OpenAI's clients are answered: whole, or piece by piece as the chunks of a stream."""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Logprob, Usage
from ipc.openai.chat_tools import ToolCall
from ipc.wire.completion import Choice, Completion, TokenLogprobs


class CompletionUsage(Struct, frozen=True):
    """Tokens that a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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


PromptLogprobs = list[dict[int, Logprob] | None]


class AssistantMessage(Struct, frozen=True):
    """The model's message: content, calls, and its reasoning, which vLLM calls ``reasoning``."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class BaseChoice(Struct, frozen=True, kw_only=True):
    """The fields of all choices; the last of a stream has the ``finish_reason``."""

    index: int
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChoice(BaseChoice, frozen=True, kw_only=True):
    """One whole sample of a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class TextChoice(BaseChoice, frozen=True, kw_only=True):
    """One sample of a text, or the new part of it."""

    text: str
    logprobs: TextLogprobs | None = None


class BaseAnswer(Struct, frozen=True, kw_only=True):
    """The fields of all answers. A batch's results have no ``created``.

    In a stream ``usage`` is there on request: null, except in the last event, which has no
    choices.
    """

    id: str
    model: str
    created: int | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET


class ChatCompletion(BaseAnswer, frozen=True, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"


class TextCompletion(BaseAnswer, frozen=True, kw_only=True):
    """The answer of ``/v1/completions``, and an event of its stream."""

    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"


class ErrorDetail(Struct, frozen=True):
    """``param`` is the field that is wrong, where one is."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """An answer that is none."""

    error: ErrorDetail


def usage(cost: Usage) -> CompletionUsage:
    """The daemon's as theirs."""
    return CompletionUsage(cost.prompt_tokens, cost.completion_tokens, cost.prompt_tokens + cost.completion_tokens)


def plain_message(choice: Choice) -> tuple[AssistantMessage, str]:
    """A sample that is all content, and its finish reason."""
    return AssistantMessage(choice.text), choice.finish_reason


def chat_completion(
    whole: Completion,
    params: dict[str, object],
    name: str,
    model: str,
    message_of: Callable[[Choice], tuple[AssistantMessage, str]] = plain_message,
) -> ChatCompletion:
    """The answer to a question with these params, without its time of creation."""
    choices = []
    for choice in whole.choices:
        message, reason = message_of(choice)
        logprobs = chat_logprobs(choice.logprobs, int(str(params["logprobs"]))) if choice.logprobs else None
        choices.append(
            ChatChoice(message=message, finish_reason=reason, logprobs=logprobs, **_beside(whole, choice, params))
        )
    return ChatCompletion(id=f"chatcmpl-{name}", model=model, choices=choices, usage=usage(whole.usage))


def text_completion(whole: Completion, params: dict[str, object], name: str, model: str) -> TextCompletion:
    """The answer to a question with these params, without its time of creation."""
    choices = [
        TextChoice(
            text=choice.text,
            finish_reason=choice.finish_reason,
            logprobs=text_logprobs(choice.logprobs) if choice.logprobs else None,
            **_beside(whole, choice, params),
        )
        for choice in whole.choices
    ]
    return TextCompletion(id=f"cmpl-{name}", model=model, choices=choices, usage=usage(whole.usage))


def chat_logprobs(tokens: list[TokenLogprobs], count: int) -> ChatLogprobs:
    """A chat's log-probabilities, with the ``count`` likeliest."""
    return ChatLogprobs([_chat_logprob(token, count) for token in tokens])


def text_logprobs(tokens: list[TokenLogprobs], offset: int = 0, *, first: str | None = None) -> TextLogprobs:
    """A text's log-probabilities, from ``offset`` characters on; a token ``first`` has none."""
    unknown = [None] if first is not None else []
    own = [next(iter(token.values())) for token in tokens]
    texts = ([] if first is None else [first]) + [one.decoded_token or "" for one in own]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return TextLogprobs(
        tokens=texts,
        token_logprobs=[*unknown, *(one.logprob for one in own)],
        top_logprobs=[
            *unknown,
            *({one.decoded_token or "": one.logprob for one in token.values()} for token in tokens),
        ],
        text_offset=offsets,
    )


def _beside(whole: Completion, choice: Choice, params: dict[str, object]) -> dict[str, Any]:
    """The fields of any choice. Those of the prompt come once, with the first sample."""
    is_first = choice is whole.choices[0]
    return {
        "index": choice.index,
        "token_ids": choice.token_ids if params.get("detokenize") is False else UNSET,
        "prompt_logprobs": whole.prompt_logprobs if is_first and whole.prompt_logprobs else UNSET,
    }


def _chat_logprob(token: TokenLogprobs, count: int) -> ChatLogprob:
    own, *_ = token.values()
    likeliest = [TopLogprob(*_spelt(one)) for one in token.values() if one.rank <= count]
    return ChatLogprob(*_spelt(own), likeliest)


def _spelt(one: Logprob) -> tuple[str, float, list[int]]:
    text = one.decoded_token or ""
    return text, one.logprob, list(text.encode())
