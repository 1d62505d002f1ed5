"""What the text of a chat's answer turns out to be, a piece at a time."""

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More content for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of the model's reasoning."""

    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """The ``index``-th call of this answer, from 0, is of this function; its arguments follow."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of a call: a piece of JSON text."""

    index: int
    text: str


OutputEvent = Content | Reasoning | CallBegins | CallArguments


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The same in as few events as can be; none is empty."""
    found: list[OutputEvent] = []
    for event in events:
        last = found[-1] if found else None
        if not isinstance(event, CallBegins) and not event.text:
            continue
        if isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            found[-1] = CallArguments(event.index, last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        else:
            found.append(event)
    return found
