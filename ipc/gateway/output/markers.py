"""Looking for a marker in a text that comes in pieces."""

MAX_SPACE = 1024
"""Characters of whitespace beside a marker that are none of the text; what is more is text.

So no more is held, nor looked at again with each piece.
"""


def before(text: str, marker: str) -> str:
    """The part of a text that is surely before ``marker`` and the whitespace before it."""
    return without_space(text[: len(text) - partial(text, marker)])


def without_space(text: str) -> str:
    """A text that is before a marker, without the whitespace between them."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


def behind_space(text: str) -> str | None:
    """What follows the whitespace at the beginning of a text; None where that is more than is none of the text."""
    rest = text.lstrip()
    return None if len(text) - len(rest) > MAX_SPACE else rest


def partial(text: str, marker: str) -> int:
    """Characters at the end of the text that may be the beginning of the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
