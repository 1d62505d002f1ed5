"""The messages between the driver's threads.

The inbox of the execution thread takes each Inbound. It is unbounded; senders of an Admit wait
briefly where many are there. The queue of the summary thread is short, and only the execution
thread puts a Summary into it. One queue carries a request's opening, tokens and end, so their order
holds.
"""

from collections.abc import Callable

import msgspec

from driver.errors import DriverError
from driver.open_requests import OpenRequest
from driver.operations.weight_updates import FinishUpdate, FinishWake, RereadWeights
from driver.request import ReturnChannel, UpdateMode
from driver.resumption import Resumed
from engine.adapters.adapter import Adapter
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput


class Opened(msgspec.Struct, frozen=True):
    """A request has been prepared; outputs of its sequences may follow.

    ``prompt_tail`` are the last prompt tokens, for the detokenizer; ``resumed`` are the samples
    that continue an earlier output.
    """

    request: OpenRequest
    sequences: list[Sequence]
    """One for each sample. The execution thread writes them; the summary thread reads times."""
    prompt_tail: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    resumed: list[Resumed] = []

    def num_cached_tokens(self, index: int) -> int:
        """Prompt tokens that a sample found in the prefix cache, without resumed output."""
        return min(self.sequences[index].num_cached_tokens, self.num_prompt_tokens)

    def num_host_tokens(self, index: int) -> int:
        """Those of them that the host's memory had, which come last."""
        sequence = self.sequences[index]
        before = sequence.num_cached_tokens - sequence.num_host_tokens
        return max(0, self.num_cached_tokens(index) - before)


class Admit(msgspec.Struct, frozen=True):
    """Serve these sequences, one for each sample that is not complete yet.

    The execution thread sends ``opened`` to the summary thread before their first output.
    """

    sequences: list[Sequence]
    opened: Opened


class AbortSequences(msgspec.Struct, frozen=True):
    """End the sequences of a request that was aborted."""

    request: OpenRequest


class Finished(msgspec.Struct, frozen=True):
    """End this sequence: its text has a stop string, or repeats itself."""

    sequence_id: str


class SleepEngine(msgspec.Struct, eq=False):
    """Free the pages' memory, unless the driver was woken meanwhile; answer the channel."""

    request_id: str
    channel: ReturnChannel
    level: int = 1
    """2 frees the weights' memory too."""
    cancelled: bool = False


class WakeEngine(msgspec.Struct, frozen=True):
    """Allocate the pages' memory again, have the weights read again; then answer the channel.

    ``read`` gives the order to read them to the thread of weights; raises Overloaded.
    """

    request_id: str
    channel: ReturnChannel
    read: Callable[[RereadWeights], None]
    weights: bool = True
    pages: bool = True


class PauseEngine(msgspec.Struct, frozen=True):
    """Run no step from now on, in one of UpdateMode's ways; then answer the channel."""

    request_id: str
    mode: UpdateMode
    clear_cache: bool
    channel: ReturnChannel


class ResumeEngine(msgspec.Struct, frozen=True):
    """Run steps again; then answer the channel."""

    request_id: str
    channel: ReturnChannel


class ProfileEngine(msgspec.Struct, frozen=True):
    """Start a trace into this directory, or write the running one; answer the channel."""

    request_id: str
    directory: str | None
    channel: ReturnChannel


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Empty the prefix cache; then answer the channel."""

    request_id: str
    channel: ReturnChannel


class AddAdapter(msgspec.Struct, frozen=True):
    """Have the engine serve this adapter; then call ``done``, with the error if that is a fault of ours."""

    adapter: Adapter
    done: Callable[[DriverError | None], None]


class RemoveAdapter(msgspec.Struct, frozen=True):
    """Free an adapter's memory: no sequence that is admitted from now on has it."""

    uid: int


class Compiled(msgspec.Struct, frozen=True):
    """Call the engine's ``adopt``."""


class Stop(msgspec.Struct, frozen=True):
    """End the thread."""


class StepOutputs(msgspec.Struct, frozen=True):
    """The tokens of one step, or of several with the same weights."""

    outputs: list[SequenceOutput]
    weight_version: int = 1


class Ended(msgspec.Struct, frozen=True):
    """The engine ended this sequence by abort or timeout; later outputs are dropped."""

    sequence_id: str
    finish_reason: str


Change = SleepEngine | WakeEngine | FinishWake | PauseEngine | ResumeEngine | FinishUpdate
"""A command that changes the whole engine, between two steps."""
Inbound = (
    Admit
    | AbortSequences
    | Finished
    | Change
    | ProfileEngine
    | ResetPrefixCache
    | AddAdapter
    | RemoveAdapter
    | Compiled
    | Stop
)
Summary = Opened | StepOutputs | Ended
