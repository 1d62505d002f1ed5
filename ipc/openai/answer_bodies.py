"""What OpenAI's clients are answered: whole, or piece by piece as the chunks of a stream."""

from collections.abc import Callable
from typing import Literal

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
    """The token that is there, and the likeliest."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """An entry for each token."""

    content: list[ChatLogprob]


class TextLogprobs(Struct, frozen=True):
    """An entry for each token, in each list. With ``echo`` the prompt's come first; the first of all has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogprobs = list[dict[int, Logprob] | None]


class AssistantMessage(Struct, frozen=True):
    """What the model says, which functions it calls, and what it has thought, which vLLM has as ``reasoning``."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One whole sample of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    """The answer of ``/v1/chat/completions``. In a batch's results nothing says when it was ``created``."""

    id: str
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    created: int | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class TextChoice(Struct, frozen=True):
    """One whole sample of a text."""

    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Struct, frozen=True):
    """The answer of ``/v1/completions``. In a batch's results nothing says when it was ``created``."""

    id: str
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    created: int | UnsetType = UNSET
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
    """A sample of which all is content, and why it ended."""
    return AssistantMessage(choice.text), choice.finish_reason


def chat_completion(
    whole: Completion,
    params: dict[str, object],
    name: str,
    model: str,
    message_of: Callable[[Choice], tuple[AssistantMessage, str]] = plain_message,
) -> ChatCompletion:
    """The answer to a question with these params, not yet said when it was created."""
    choices = [
        ChatChoice(
            choice.index,
            *message_of(choice),
            chat_logprobs(choice.logprobs, int(str(params["logprobs"]))) if choice.logprobs else None,
            choice.token_ids if params.get("detokenize") is False else UNSET,
            _of_the_prompt(whole, choice),
        )
        for choice in whole.choices
    ]
    return ChatCompletion(f"chatcmpl-{name}", model, choices, usage(whole.usage))


def text_completion(whole: Completion, params: dict[str, object], name: str, model: str) -> TextCompletion:
    """The answer to a question with these params, not yet said when it was created."""
    choices = [
        TextChoice(
            choice.index,
            choice.text,
            choice.finish_reason,
            text_logprobs(choice.logprobs) if choice.logprobs else None,
            choice.token_ids if params.get("detokenize") is False else UNSET,
            _of_the_prompt(whole, choice),
        )
        for choice in whole.choices
    ]
    return TextCompletion(f"cmpl-{name}", model, choices, usage(whole.usage))


def chat_logprobs(tokens: list[TokenLogprobs], count: int) -> ChatLogprobs:
    """Those of a chat, with so many of the likeliest."""
    return ChatLogprobs([_chat_logprob(token, count) for token in tokens])


def text_logprobs(tokens: list[TokenLogprobs], offset: int = 0, *, first: str | None = None) -> TextLogprobs:
    """Those of a text, of which so many characters came before; ``first`` is a token before them that has none."""
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


def _of_the_prompt(whole: Completion, choice: Choice) -> PromptLogprobs | UnsetType:
    """Said once, with the first sample."""
    return whole.prompt_logprobs if whole.prompt_logprobs and choice is whole.choices[0] else UNSET


def _chat_logprob(token: TokenLogprobs, count: int) -> ChatLogprob:
    own, *_ = token.values()
    likeliest = [TopLogprob(*_spelt(one)) for one in token.values() if one.rank <= count]
    return ChatLogprob(*_spelt(own), likeliest)


def _spelt(one: Logprob) -> tuple[str, float, list[int]]:
    text = one.decoded_token or ""
    return text, one.logprob, list(text.encode())
