"""What the driver's threads say to each other, a struct per message.

To the execution thread (its inbox holds any number, so that nobody who tells it something ever waits):
Admit, AbortSequences, Finished, SleepEngine, WakeEngine, ProfileEngine, Compiled, Stop. To the summary thread (few at a time; only the execution thread puts):
Opened, StepOutputs, Ended. One queue carries the opening of a request, its tokens and its end, so they cannot overtake each other.
"""

import msgspec

from driver.open_requests import OpenRequest
from driver.request import ReturnChannel
from driver.resumption import Resumed
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput


class Opened(msgspec.Struct, frozen=True):
    """Outputs of this request's sequences may follow. ``prompt_tail`` are the last prompt tokens, for the detokenizer.

    ``resumed`` are the samples of which the client has something already.
    """

    request: OpenRequest
    sequences: list[Sequence]
    """One for each sample. The execution thread writes them; the summary thread reads what is set before an output: times."""
    prompt_tail: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    resumed: list[Resumed] = []


class Admit(msgspec.Struct, frozen=True):
    """Serve these sequences, one for each sample that is not whole yet.

    ``opened`` goes on to the summary thread ahead of their first output.
    """

    sequences: list[Sequence]
    opened: Opened


class AbortSequences(msgspec.Struct, frozen=True):
    """The client wants no more of this request."""

    request: OpenRequest


class Finished(msgspec.Struct, frozen=True):
    """This sequence has ended by what it says: a stop string was found, or a loop."""

    sequence_id: str


class SleepEngine(msgspec.Struct, eq=False):
    """Give the pages' memory back, as no request is open, unless the driver was woken meanwhile; tell the channel."""

    request_id: str
    channel: ReturnChannel
    cancelled: bool = False


class WakeEngine(msgspec.Struct, frozen=True):
    """Take the pages' memory again; tell the channel."""

    request_id: str
    channel: ReturnChannel


class ProfileEngine(msgspec.Struct, frozen=True):
    """Begin a trace for this directory, or end the one under way where there is none; tell the channel."""

    request_id: str
    directory: str | None
    channel: ReturnChannel


class Compiled(msgspec.Struct, frozen=True):
    """The engine has something to ``adopt``."""


class Stop(msgspec.Struct, frozen=True):
    """End the thread."""


class StepOutputs(msgspec.Struct, frozen=True):
    """Tokens of one step."""

    outputs: list[SequenceOutput]


class Ended(msgspec.Struct, frozen=True):
    """The engine has let go of this sequence because of an AbortSequences or a timeout; outputs that still come are late."""

    sequence_id: str
    finish_reason: str


Inbound = Admit | AbortSequences | Finished | SleepEngine | WakeEngine | ProfileEngine | Compiled | Stop
Summary = Opened | StepOutputs | Ended
