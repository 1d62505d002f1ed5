"""What is copied between the device and the host with one plan."""

import msgspec


class Copies(msgspec.Struct, frozen=True, tag="make copies"):
    """Pages, or states, that are copied between the device and the host (caching/host_tier.py).

    A command of its own to a StepExecutor: every process makes them of its part.

    They come before the step: the device runs ``places``, then ``stores``, then the step. What has
    come can be evicted in the plan in which it is placed, and is then stored from its place. What
    the step writes is not stored, and what it reads is in place.
    """

    stores: list[tuple[int, int]]
    """Pages, and the host's slots that get their contents."""
    places: list[list[int]]
    """Of the oldest lists of ``fetches``, which have arrived, the page of each; or the sink."""
    fetches: list[int]
    """The host's slots whose contents begin their way to the device."""
    of_states: bool
    """Whether what is called a page here is the device's slot of a recurrent state."""
