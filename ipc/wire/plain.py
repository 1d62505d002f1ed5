"""Anybody's words in rich's tables."""

from rich.text import Text

from ipc.wire.escaping import one_line


def plain(value: object, style: str = "") -> Text:
    """A value as it is, for a cell or a title: rich would read a string as its markup."""
    return Text(one_line(str(value)), style)
