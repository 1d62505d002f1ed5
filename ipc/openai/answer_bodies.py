"""What OpenAI's clients are answered: whole, or piece by piece as the chunks of a stream."""

from collections.abc import Callable
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from driver.request import Logprob, Usage
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.chat_tools import ToolCall
from ipc.openai.logprob_bodies import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from ipc.openai.timing_bodies import AnswerTimings
from ipc.wire.completion import Choice, Completion, Piece

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, frozen=True):
    """Tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class CompletionUsage(Struct, frozen=True):
    """Tokens that a request cost. A stream's usage so far has no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


PromptLogprobs = list[dict[int, Logprob] | None]


class AssistantMessage(Struct, frozen=True):
    """The model's message: content, calls, and its reasoning, which vLLM calls ``reasoning``."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class BaseChoice(Struct, frozen=True, kw_only=True):
    """The fields of all choices; the last of a stream has the ``finish_reason``.

    As in vLLM the ``stop_reason`` says more: the stop string or token, or "repetition", "timeout"
    or "abort". ``weight_versions`` are pairs of a version of the weights, which operators may
    change, and the index of the first token that it made; none if it is 1 for all.
    """

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_versions: list[tuple[int, int]] | UnsetType = UNSET


class ChatChoice(BaseChoice, frozen=True, kw_only=True):
    """One whole sample of a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class TextChoice(BaseChoice, frozen=True, kw_only=True):
    """One sample of a text, or the new part of it."""

    text: str
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class BaseAnswer(Struct, frozen=True, kw_only=True):
    """The fields of all answers. A batch's results have no ``created`` and no ``timings``.

    In a stream ``usage`` is there on request: null, except in the last event, which has no
    choices.
    """

    id: str
    model: str
    created: int | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: AnswerTimings | UnsetType = UNSET


class ChatCompletion(BaseAnswer, frozen=True, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


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
    total = cost.prompt_tokens + cost.completion_tokens
    details = PromptTokensDetails(cost.cached_tokens)
    return CompletionUsage(cost.prompt_tokens, cost.completion_tokens, total, details)


def total(costs: list[Usage]) -> Usage:
    """The tokens of several prompts together."""
    return Usage(
        sum(cost.prompt_tokens for cost in costs),
        sum(cost.completion_tokens for cost in costs),
        sum(cost.cached_tokens for cost in costs),
    )


THEIR_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "repetition": "stop",
    "timeout": "length",
    "abort": "length",
}
"""OpenAI's finish reasons for ours: an output that was cut off has "length"."""


def ending(reason: str, last: Choice | Piece) -> dict[str, Any]:
    """Finish and stop reason of a sample that has ended, and the versions of the weights."""
    theirs = THEIR_REASONS[reason]
    versions = {"weight_versions": last.weight_versions} if last.weight_versions else {}
    stop_reason = last.stop_reason if reason in (theirs, "tool_calls") else reason
    return {"finish_reason": theirs, "stop_reason": stop_reason, **versions}


def plain_message(choice: Choice) -> tuple[AssistantMessage, str]:
    """A sample that is all content, and its finish reason."""
    return AssistantMessage(choice.text), choice.finish_reason


def chat_completion(
    whole: Completion,
    answer_format: AnswerFormat,
    name: str,
    model: str,
    prompt_token_ids: list[int] | UnsetType,
    message_of: Callable[[Choice], tuple[AssistantMessage, str]] = plain_message,
) -> ChatCompletion:
    """The answer in this format, without its time of creation."""
    choices = []
    for choice in whole.choices:
        message, reason = message_of(choice)
        logprobs = chat_logprobs(choice.logprobs, answer_format) if choice.logprobs else None
        beside = _beside(whole, choice, answer_format) | ending(reason, choice)
        choices.append(ChatChoice(message=message, logprobs=logprobs, **beside))
    return ChatCompletion(
        id=f"chatcmpl-{name}", model=model, choices=choices, usage=usage(whole.usage), prompt_token_ids=prompt_token_ids
    )


def text_completion(
    whole: Completion, answer_format: AnswerFormat, name: str, model: str, prompt_token_ids: list[int] | UnsetType
) -> TextCompletion:
    """The answer in this format, without its time of creation."""
    choices = [
        TextChoice(
            text=choice.text,
            logprobs=text_logprobs(choice.logprobs, answer_format) if choice.logprobs else None,
            prompt_token_ids=prompt_token_ids,
            **_beside(whole, choice, answer_format),
            **ending(choice.finish_reason, choice),
        )
        for choice in whole.choices
    ]
    return TextCompletion(id=f"cmpl-{name}", model=model, choices=choices, usage=usage(whole.usage))


def _beside(whole: Completion, choice: Choice, answer_format: AnswerFormat) -> dict[str, Any]:
    """The fields of any choice. Those of the prompt come once, with the first sample."""
    is_first = choice is whole.choices[0]
    return {
        "index": choice.index,
        "token_ids": choice.token_ids if answer_format.with_token_ids else UNSET,
        "prompt_logprobs": whole.prompt_logprobs if is_first and whole.prompt_logprobs else UNSET,
    }
