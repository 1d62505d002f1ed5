"""A conversation's checks, and its text by the model's chat template under a budget."""

import time
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec

from driver.errors import InvalidRequest
from driver.text.json_schema import check_json
from driver.text.template_words import template_words
from driver.text.transformers_modules import transformers_module
from engine.errors import ConfigurationError
from engine.request_limits import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_SECONDS, MAX_TOOL_CALLS

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "assistant": {"reasoning_content", "tool_calls"},
    "tool": {"tool_call_id"},
}
"""Fields that messages of a role may have beside role, content and name."""
ENDS = frozenset(["add_generation_prompt", "continue_final_message"])
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


class Chat(NamedTuple):
    """A checked conversation: ``tools`` as OpenAI has them, and the arguments of calls as objects, or as the text that a
    model wrote in place of one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]


def checked_chat(
    messages: Any, tools: list[dict[str, Any]] | None = None, template_kwargs: dict[str, Any] | None = None
) -> Chat:
    """Checks a conversation; raises InvalidRequest that names what is wrong, and where.

    A message has a ``role`` and a text as its ``content``, and may have the ``name`` of who
    speaks. An assistant's may have
    ``reasoning_content``, and ``tool_calls`` (``{"function": {"name": ..., "arguments": a JSON
    object, its text, or what was written in its place}}``) in place of its content; a tool's, which
    answers a call, ``tool_call_id``.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message")
    for position, tool in enumerate(tools or []):
        _check_tool(f"tools[{position}]", tool)
    return Chat(
        [_checked_message(f"messages[{position}]", message) for position, message in enumerate(messages)],
        tools or [],
        template_kwargs or {},
    )


def read_template(path: Path) -> str:
    """The text of a chat template in a file. Raises ConfigurationError if it is none."""
    try:
        template = path.read_text(encoding="utf-8")
        _compiled(template)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {path} cannot be read: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template {path} is wrong in line {error.lineno}: {error.message}"
        ) from error
    return template


def check_template(template: str, chat: Chat) -> None:
    """Raises InvalidRequest where the template would ignore a part of the conversation."""
    names, strings = template_words(template)
    if chat.tools and names.isdisjoint(("tools", "xml_tools")):
        raise InvalidRequest("the chat template of this model knows no tools: ask without them, or serve another model")
    if any("tool_calls" in message for message in chat.messages) and "tool_calls" not in names | strings:
        raise InvalidRequest("the chat template of this model knows no tool_calls: send what was called as text")
    for name in chat.template_kwargs.keys() - ENDS:
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


def check_encodable(what: str, text: str) -> None:
    """Raises InvalidRequest for text that UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} holds half a surrogate pair at character {error.start}, which is no text"
        ) from error


def _checked_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise InvalidRequest(f"{where} must have role and content")
    role, calls = message["role"], message.get("tool_calls")
    if role not in ROLES:
        raise InvalidRequest(f"{where}: role must be one of {', '.join(ROLES)}, not {role!r}")
    if unknown := message.keys() - {"role", "content", "name"} - _FIELDS.get(role, set()):
        raise InvalidRequest(f"{where}: a message of role {role} has no {min(map(str, unknown))!r}")
    checked = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls and checked.get("content") is None:
        checked["content"] = ""
    if "content" not in checked:
        raise InvalidRequest(f"{where} must have role and content")
    for name, text in checked.items():
        _check_text(where, name, text)
    return {**checked, "tool_calls": _checked_calls(where, calls)} if calls else checked


def _check_text(where: str, name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: {name} must be a string, not {type(text).__name__}")
    check_encodable(where, text)


def _checked_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidRequest(f"{where}: tool_calls may be {MAX_TOOL_CALLS}, not {len(calls)}")
    return [_checked_call(f"{where}.tool_calls[{position}]", call) for position, call in enumerate(calls)]


def _checked_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must have a function with a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _read_arguments(where, arguments)
    elif not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: its arguments must be a JSON object, not {type(arguments).__name__}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _read_arguments(where: str, text: str) -> dict[str, Any] | str:
    """The object; the text itself where it is none, as a call's may be that a model got wrong or was cut off in. The
    template writes it as it is, or refuses it."""
    check_encodable(where, text)
    try:
        check_json(text.encode())
    except ValueError as error:
        raise InvalidRequest(f"{where}: its arguments cannot be read: {error}") from error
    with suppress(msgspec.DecodeError):
        arguments = msgspec.json.decode(text or "{}")
        if isinstance(arguments, dict):
            return arguments
    return text


def _check_tool(where: str, tool: dict[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be of type function, with a function that has a name")


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
        check_template(template, chat)
        names, strings = template_words(template)
        if tools and "tools" not in names:
            ends |= {"xml_tools": tools}  # SmolLM3's name of them
        messages = chat.messages if "developer" in strings else _without_developers(chat.messages)
        return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, **ends))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        jinja2.TemplateError,
    ) as error:
        # The template is a program, and these errors come from its input.
        raise InvalidRequest(f"the chat template of this model refuses these messages: {error}") from error
    finally:
        _budget.reset(token)


def hold_to_budget(tokenizer: Any) -> None:
    """Makes the templates of a transformers tokenizer charge the current budget."""
    templates = tokenizer.chat_template or {}
    for source in [templates] if isinstance(templates, str) else templates.values():
        try:
            environment = _compiled(source).environment
        except jinja2.TemplateError:
            continue  # each conversation will get this error
        if environment.concat is not _join:
            environment.concat = _join
            for name in ("getattr", "getitem", "call"):
                setattr(environment, name, _spending(getattr(environment, name)))


def _compiled(template: str) -> Any:
    """The template as transformers will render it, in the same environment."""
    return transformers_module("utils.chat_template_utils")._compile_jinja_template(template)


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
