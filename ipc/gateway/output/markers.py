"""Looking for a marker in a text that comes in pieces."""


def before(text: str, marker: str) -> str:
    """The part of a text that is surely before ``marker`` and the whitespace before it."""
    return text[: len(text) - partial(text, marker)].rstrip()


def partial(text: str, marker: str) -> int:
    """Characters at the end of the text that may be the beginning of the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
