"""A conversation's text by the model's chat template, under a budget."""

import json
import time
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from driver.errors import InvalidRequest
from driver.text.content_parts import OF_INPUT, compiled, in_parts
from driver.text.conversation import Chat
from driver.text.template_words import template_words
from engine.errors import ConfigurationError
from engine.models.weights.sources.checkpoint import read_json
from engine.request_limits import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_SECONDS

_ENDS = frozenset(["add_generation_prompt", "continue_final_message"])
"""Arguments of every template: the assistant speaks next, or continues the last message."""
_RESERVED = frozenset(
    [
        "chat_template",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)
"""Arguments of transformers' apply_chat_template (version 5), which are not the template's own."""


def read_template(path: Path) -> str:
    """The text of a chat template in a file. Raises ConfigurationError if it is none."""
    try:
        template = path.read_text(encoding="utf-8")
        compiled(template)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {path} cannot be read: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template {path} is wrong in line {error.lineno}: {error.message}"
        ) from error
    return template


class _OfProcessor(msgspec.Struct):
    """``chat_template.json``."""

    chat_template: str | None = None


def processor_template(directory: Path) -> str | None:
    """The template that a model for images may have beside its tokenizer's files alone, if it has one. Raises
    ConfigurationError."""
    path = directory / "chat_template.json"
    return read_json(path, _OfProcessor).chat_template if path.is_file() else None


def _check_template(template: str, chat: Chat) -> None:
    """Raises InvalidRequest where the template would ignore a part of the conversation."""
    names, strings = template_words(template)
    if chat.tools and names.isdisjoint(("tools", "xml_tools")):
        raise InvalidRequest("the chat template of this model knows no tools: ask without them, or serve another model")
    if any("tool_calls" in message for message in chat.messages) and "tool_calls" not in names | strings:
        raise InvalidRequest("the chat template of this model knows no tool_calls: send what was called as text")
    for name in chat.template_kwargs.keys() - _ENDS:
        if name in _RESERVED or name not in names:
            raise InvalidRequest(f"chat_template_kwargs: the chat template of this model has no {name!r}")


def _without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With OpenAI's role developer as system, which it is a newer name of.

    Messages that stand together and so get the same role become one: many templates take one
    system message, and that first.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    renamed: list[dict[str, Any]] = []
    for message in messages:
        is_system = message["role"] in ("developer", "system")
        if is_system and renamed and renamed[-1]["role"] == "system":
            content = f"{renamed[-1]['content']}\n\n{message['content']}"
            renamed[-1] = {**renamed[-1], "content": content}
        else:
            renamed.append({**message, "role": "system"} if is_system else message)
    return renamed


READ_CLOCK_EVERY = 16
"""Attributes, items, calls and texts of a template between two readings of the clock."""


class _Budget:
    """The budget of one rendering: length of its text, and processor time of this thread."""

    def __init__(self) -> None:
        self._until = time.thread_time() + MAX_TEMPLATE_SECONDS
        self._steps = 0

    def spend(self) -> None:
        """Counts a step; raises InvalidRequest once the time is spent."""
        self._steps += 1
        if self._steps % READ_CLOCK_EVERY == 0 and time.thread_time() > self._until:
            long = f"more than {MAX_TEMPLATE_SECONDS:g} s of a processor"
            raise InvalidRequest(f"the chat template of this model takes {long} for these messages: send fewer")

    def join(self, pieces: Iterable[str]) -> str:
        """Joins the pieces; raises InvalidRequest as soon as the text is too long."""
        joined, size = [], 0
        for piece in pieces:
            joined.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                most = f"more than {MAX_RENDERED_CHARACTERS} characters"
                raise InvalidRequest(f"the chat template of this model makes {most} of these messages: send fewer")
            self.spend()
        return "".join(joined)


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def rendered(tokenizer: Any, chat: Chat) -> str:
    """The text of a conversation by the template of a tokenizer after ``hold_to_budget``.

    Raises InvalidRequest where the template refuses or ignores a part, or exceeds its budget.
    """
    if tokenizer.chat_template is None:
        raise InvalidRequest(
            "this model has no chat template: send a prompt instead of messages (`odriver complete`), or serve it with --chat-template"
        )
    tools = chat.tools or None
    ends = {"add_generation_prompt": True} | chat.template_kwargs
    token = _budget.set(_Budget())
    try:
        template = tokenizer.get_chat_template(tools=tools)
        _check_template(template, chat)
        names, strings = template_words(template)
        if tools and "tools" not in names:
            ends |= {"xml_tools": tools}  # SmolLM3's name of them
        messages = chat.messages if "developer" in strings else _without_developers(chat.messages)
        messages = in_parts(template, messages)
        try:
            return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, **ends))
        except TypeError:  # DeepSeek's and Apertus's templates put arguments together with text
            if not any("tool_calls" in message for message in messages):
                raise
            messages = [_with_arguments_as_text(message) for message in messages]
            return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, **ends))
    except OF_INPUT as error:
        raise InvalidRequest(f"the chat template of this model refuses these messages: {error}") from error
    finally:
        _budget.reset(token)


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def hold_to_budget(tokenizer: Any) -> None:
    """Makes the templates of a transformers tokenizer charge the current budget."""
    templates = tokenizer.chat_template or {}
    for source in [templates] if isinstance(templates, str) else templates.values():
        try:
            environment = compiled(source).environment
        except jinja2.TemplateError:
            continue  # each conversation will get this error
        if environment.concat is not _join:
            environment.concat = _join
            for name in ("getattr", "getitem", "call"):
                setattr(environment, name, _spending(getattr(environment, name)))


def _join(pieces: Iterable[str]) -> str:
    budget = _budget.get()
    return "".join(pieces) if budget is None else budget.join(pieces)


def _spending(step: Any) -> Any:
    def spend(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        if budget is not None:
            budget.spend()
        return step(*args, **kwargs)

    return spend
