"""The format in which a family of models writes that it calls a function."""

from collections.abc import Callable
from typing import NamedTuple

import regex

from ipc.gateway.output.argument_readers import Tags
from ipc.gateway.output.call_literals import Call

FUNCTION = r"(?P<name>[\w.-]{1,128})"
"""Matches the name of a function."""


def all_of(*texts: str) -> "regex.Pattern[str]":
    """Matches what has all of these, in any order, in linear time."""
    return regex.compile(r"\A" + "".join(f"(?=(?s:.*){text})" for text in texts))


class ToolFormat(NamedTuple):
    """The format of a call, and of all calls of an answer.

    To be read, calls begin with ``marker`` or, where the format is ``bare``, at the very
    beginning with ``first``, with which further calls may begin as well. ``header``, which ends in front of the
    arguments, says the name, and any of ``closers`` may follow. Arguments are a JSON object,
    unless there are ``tags``. An object that has the name elsewhere than the header looks for it
    is a call as well. Where ``calls`` reads them, all that the header begins up to ``last``,
    outside of strings in these ``quotes``, is read at once.

    To be written, it is ``call[0]`` name ``call[1]`` arguments ``call[2]``, ``between`` any two of
    them (None allows no two), and ``around`` all. ``tokens`` of these texts are tokens of their
    own where the model has them, and where they are ``special`` the text has none of them unless
    it is asked for. With ``short_ids`` the chat template takes only ids of nine letters and
    digits.
    """

    marker: str
    header: "regex.Pattern[str]"
    closers: tuple[str, ...]
    call: tuple[str, str, str]
    evidence: "regex.Pattern[str]"
    """Matches the chat templates of models that write this format."""
    tokens: tuple[str, ...] = ()
    between: str | None = ""
    around: tuple[str, str] = ("", "")
    first: str = "{"
    bare: bool = False
    special: bool = False
    short_ids: bool = False
    tags: Tags | None = None
    calls: Callable[[str], list[Call] | None] | None = None
    last: str = ""
    quotes: tuple[str, ...] = ()

    @property
    def has_objects(self) -> bool:
        """Whether a call may be an object with its name in it."""
        return self.first == "{" and self.tags is None
