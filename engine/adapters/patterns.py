"""The regular expressions of an adapter's configuration, which is read while a daemon serves.

Other threads run while one is matched, which ``re`` would not let them, and one that takes too long
is refused.
"""

import re
from functools import lru_cache

import regex

from engine.adapters.adapter import AdapterError

LONGEST = 10_000
"""Characters of an expression."""
SECONDS = 5.0
"""For one name: whoever repeats what is repeated asks for years."""
KEPT = 4096
"""Compiled expressions: PEFT's EVA writes one for each module, and each is matched with all modules."""


def check_pattern(origin: str, pattern: str) -> None:
    """Raises AdapterError for what is no expression of ``re``, by which PEFT matches: ``regex`` knows more, such as
    recursion, which may take any memory."""
    try:
        if len(pattern) > LONGEST:
            raise regex.error("it is too long")
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{origin}: {pattern[:50]} is no pattern of modules: {error}") from error


def matched(pattern: str, name: str, *, whole: bool = False) -> "regex.Match[str] | None":
    """The match of the beginning of a name, or of the ``whole``. Raises AdapterError if it takes
    too long, and if one in which ``check_pattern`` found no fault has one where it is a part of another."""
    try:
        compiled = _compiled(pattern)
        match = compiled.fullmatch if whole else compiled.match
        return match(name, timeout=SECONDS, concurrent=True)
    except TimeoutError as error:
        raise AdapterError(f"the pattern of modules {pattern[:50]} takes too long to match {name}") from error
    except regex.error as error:
        raise AdapterError(f"{pattern[:50]} is no pattern of modules: {error}") from error


@lru_cache(KEPT)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)
