"""A model's chat template, run under a budget: a program of the model's, whose input is the client's."""

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import jinja2

from driver.errors import InvalidRequest
from driver.text.conversation import Chat, check_template
from engine.request_limits import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_SECONDS

LOOK_EVERY = 16
"""Attributes, items, calls and texts of a template between two looks at the clock."""


class _Budget:
    """Of one rendering: how long its text may be, and how long it may take of this thread's processor time."""

    def __init__(self) -> None:
        self._until = time.thread_time() + MAX_TEMPLATE_SECONDS
        self._steps = 0

    def spend(self) -> None:
        """Counts a step; raises InvalidRequest once the time is over."""
        self._steps += 1
        if self._steps % LOOK_EVERY == 0 and time.thread_time() > self._until:
            long = f"more than {MAX_TEMPLATE_SECONDS:g} s of a processor"
            raise InvalidRequest(f"the chat template of this model takes {long} for these messages: send fewer")

    def join(self, pieces: Iterable[str]) -> str:
        """The pieces as one text; raises InvalidRequest as soon as that is too long."""
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
    """What the template of a transformers tokenizer, which is held to its budget, makes of a conversation.

    Raises InvalidRequest where the template refuses it, would ignore a part of it, or comes to the end of its budget.
    """
    if tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template: send a prompt instead of messages")
    tools = chat.tools or None
    ends = {"add_generation_prompt": True} | chat.template_kwargs
    token = _budget.set(_Budget())
    try:
        check_template(tokenizer.get_chat_template(tools=tools), chat)
        return str(tokenizer.apply_chat_template(chat.messages, tools, tokenize=False, **ends))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        jinja2.TemplateError,
    ) as error:
        # A template is a program, and these messages are its input.
        raise InvalidRequest(f"the chat template of this model refuses these messages: {error}") from error
    finally:
        _budget.reset(token)


def hold_to_budget(tokenizer: Any) -> None:
    """Has the templates of a transformers tokenizer ask for the budget of who renders, at each step and for each text."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = tokenizer.chat_template or {}
    for source in [templates] if isinstance(templates, str) else templates.values():
        try:
            environment = _compile_jinja_template(source).environment  # the one that transformers renders in
        except jinja2.TemplateError:
            continue  # which every conversation will hear of
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
