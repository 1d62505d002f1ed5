"""What a conversation may hold: the checks of its messages, calls and tools."""

from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from driver.errors import InvalidRequest
from driver.text.json_schema import check_json
from engine.request_limits import MAX_TOOL_CALLS

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "assistant": {"reasoning_content", "tool_calls"},
    "tool": {"tool_call_id"},
}
"""Fields that messages of a role may have beside role, content and name."""


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
    # In the client's order, in which a template may write it.
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


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
