"""What operators have done with adapters."""

import msgspec

from driver.request import ReturnChannel


class LoadAdapter(msgspec.Struct, frozen=True):
    """Load an adapter of this name, from its own name if there is no path; answer the channel.

    One that is loaded gets a new version, unless it is not to be ``replace``d. One that is pinned
    is never evicted.
    """

    request_id: str
    channel: ReturnChannel
    name: str
    path: str | None = None
    pin: bool = False
    replace: bool = True


class UnloadAdapter(msgspec.Struct, frozen=True):
    """Unload an adapter; open requests go on with it. Answer the channel."""

    request_id: str
    channel: ReturnChannel
    name: str
