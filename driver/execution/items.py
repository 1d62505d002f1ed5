"""What the execution thread works on, one at a time, so that a fault ends one request."""

import msgspec

from driver.request import ReturnSample
from driver.thread_messages import (
    AbortSequences,
    AddAdapter,
    Admit,
    Change,
    Finished,
    ProfileEngine,
    RemoveAdapter,
    ResetPrefixCache,
)
from engine.adapters.adapter import Adapter


class Overdue(msgspec.Struct, frozen=True):
    """This sequence has reached its timeout."""

    sequence_id: str


class Changed(msgspec.Struct, frozen=True):
    """The whole engine has been changed; the answer is to be sent."""

    change: Change
    answer: ReturnSample


Item = (
    Admit
    | AbortSequences
    | Finished
    | ProfileEngine
    | ResetPrefixCache
    | AddAdapter
    | RemoveAdapter
    | Overdue
    | Changed
)


def source(item: Item) -> tuple[str, str]:
    """Client and request id of an item. Operators are one client, and where it is not known, it is the id."""
    match item:
        case Admit(opened=opened):
            return opened.request.source
        case AbortSequences(request=request):
            return request.source
        case Finished(sequence_id=sequence_id) | Overdue(sequence_id=sequence_id):
            return sequence_id, sequence_id
        case ProfileEngine(request_id=request_id) | ResetPrefixCache(request_id=request_id):
            return "", request_id
        case AddAdapter(adapter=Adapter(uid=uid)) | RemoveAdapter(uid=uid):
            return "", f"adapter {uid}"
        case Changed(change=change):
            return "", change.request_id
