"""Which chat templates take the content of a message as a list of parts, as those of many models for images do."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import jinja2

from driver.text.transformers_modules import transformers_module

OF_INPUT = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, jinja2.TemplateError)
"""A template is a program, and these errors of its rendering come from its input."""
_PROBE = "content of a message"
_BEFORE = {"system": (), "developer": (), "user": (), "assistant": ("user",), "tool": ("user", "assistant")}
"""The roles that come before one in a conversation that templates take."""
_SPECIAL = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")


def compiled(template: str) -> Any:
    """The template as transformers will render it, in the same environment. Raises jinja2's TemplateError."""
    return transformers_module("utils.chat_template_utils")._compile_jinja_template(template)


def in_parts(template: str, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their contents in the form that the template takes: of roles whose text it writes only where it
    is ``[{"type": "text", "text": ...}]``, in that."""
    roles = _roles_of_parts(template)
    return [
        {**message, "content": _parts(message["content"])} if message["role"] in roles else message
        for message in messages
    ]


@lru_cache(maxsize=8)
def _roles_of_parts(template: str) -> frozenset[str]:
    return frozenset(
        role for role in _BEFORE if not _is_written(template, role, str) and _is_written(template, role, _parts)
    )


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_written(template: str, role: str, form: Callable[[str], Any]) -> bool:
    messages = [{"role": before, "content": form("")} for before in _BEFORE[role]]
    messages.append({"role": role, "content": form(_PROBE)})
    try:
        return _PROBE in compiled(template).render(messages=messages, add_generation_prompt=True, **_SPECIAL)
    except OF_INPUT:
        return False
