"""The names that bodies have for what the daemon calls otherwise, in its errors."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ipc.errors import RequestFailed

_QUOTED = r"""(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*\""""
"""In an error, perhaps a text of the client's."""


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the daemon that come within name fields as the body does: ``names`` are the body's, by the daemon's."""
    try:
        yield
    except RequestFailed as error:
        message = _renamed(error.message, names)
        if message == error.message:
            raise
        raise RequestFailed(error.code, message, error.retry_after_s) from error


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """A name without an underscore, such as ``messages``, is one at the beginning alone, and the place in it is left
    out: the body may number its parts otherwise."""
    if not names:
        return message
    found = "|".join(name if "_" in name else rf"\A{name}(?:\[\d+\][\w.\[\]]*)?" for name in names)
    words = re.compile(rf"{_QUOTED}|(?<!\w)(?:{found})(?!\w)")
    return words.sub(lambda word: names.get(word[0].partition("[")[0], word[0]), message)
