"""The turns of a conversation as OpenAI's chat API has them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ipc.openai.chat_tools import ToolCall

CacheControl = dict[str, Any]
"""Anthropic's mark of a prefix to cache, which changes nothing: all prefixes are cached."""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content. An assistant's refusal is what it said."""

    text: str | None = None
    type: Literal["text", "refusal"] = "text"
    refusal: str | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        part_text(self)


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of a conversation, as OpenAI's clients send it or got it as an answer.

    An assistant's reasoning is ``reasoning_content``, which vLLM calls ``reasoning``, and its
    ``refusal`` is what it said in place of content. Answers of OpenAI have more fields, which
    clients send back; they must be empty. Two are not read: ``type``, which lm-eval and clients of
    the Responses API write, and ``provider_specific_fields``, in which LiteLLM repeats the
    reasoning.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    cache_control: CacheControl | None = None
    type: Literal["message", "text"] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As our client takes it; an answer that was all reasoning has no content."""
        content = self.refusal if self.content is None else _text(self.content)
        if content is None and self.role == "assistant" and not self.tool_calls:
            content = ""
        said: dict[str, Any] = {
            "role": self.role,
            "content": content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.as_dict() for call in self.tool_calls or []] or None,
        }
        return {name: value for name, value in said.items() if value is not None}


def part_text(part: Any) -> str:
    """What a part says, whose type says in which field that is. Raises ValueError."""
    names = ("refusal", "text") if part.type == "refusal" else ("text", "refusal")
    text: str | None = getattr(part, names[0])
    if text is None or getattr(part, names[1]) is not None:
        raise ValueError(f"a part of type {part.type} needs {names[0]}, and no {names[1]}")
    return text


def _text(content: str | list[TextPart] | None) -> str | None:
    return "".join(map(part_text, content)) if isinstance(content, list) else content
