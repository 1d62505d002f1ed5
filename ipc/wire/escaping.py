"""Escaping of untrusted text for terminals and logs: control characters are escaped, long text is
cut.

A terminal obeys control characters, a log is read line by line, and bidirectional overrides
reorder letters. A client chooses request ids, paths and a model's output; it must not control any
of that.
"""

import re
import sys

from driver.errors import shortened

LONGEST_LINE = 4000
"""Characters of a log line."""

_HIDDEN = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""C0 and C1 controls, line separators, bidirectional overrides and lone surrogates."""
_IN_A_LINE = re.compile(f"[{_HIDDEN}]")
_IN_TEXT = re.compile(f"(?![\n\t])[{_HIDDEN}]")


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The text as one line, of at most ``longest`` characters."""
    return shortened(_IN_A_LINE.sub(_spelt, shortened(text, longest)), longest)


def visible(text: str) -> str:
    """The text for a terminal: newlines and tabs stay, other controls are spelt out."""
    return _IN_TEXT.sub(_spelt, text)


def visible_json(text: str) -> str:
    """The same JSON, with all control characters escaped."""
    return _IN_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write(text: str, end: str = "\n") -> None:
    """Print on stdout: escaped on a terminal, verbatim elsewhere."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _spelt(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
