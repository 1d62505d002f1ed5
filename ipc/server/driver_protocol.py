"""The sockets' interface of a driver."""

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from driver.adapters.commands import LoadAdapter, UnloadAdapter
from driver.request import ActiveRequest, RequestOrder, ReturnChannel, TokenizerRequest, UpdateMode
from engine.live.weight_source import WeightSource

if TYPE_CHECKING:
    from driver.adapters.registry import AdapterRegistry
    from driver.metrics.request_listing import RequestRow


class Driver(Protocol):
    """``oDriver``, or a fake one. None of it waits."""

    def submit_request(self, request: ActiveRequest) -> None:
        """Takes a request or raises DriverError."""

    def count_refusal(self, code: str) -> None:
        """Counts a request that was refused with this code before it was submitted."""

    def submit_tokenizer_request(self, request: TokenizerRequest) -> None:
        """Takes a request or raises DriverError."""

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer, by the names of tokenizer_config.json."""

    @property
    def adapters(self) -> "AdapterRegistry":
        """The adapters that requests can name."""

    def abort(self, request_id: str) -> bool:
        """Ends a request; False if there is none of that id."""

    def status(self) -> msgspec.Struct:
        """A snapshot."""

    def requests(self, order: RequestOrder, limit: int | None, client: str | None) -> "tuple[list[RequestRow], int]":
        """The first ``limit`` open requests, of one client perhaps, and how many there are."""

    @property
    def operations(self) -> "Operations":
        """What operators have it do."""


class Operations(Protocol):
    """``OperatorCommands``, or fake ones. None of it waits."""

    def command_adapters(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Have an adapter loaded or unloaded, and put a sample; or raise DriverError."""

    def reset_prefix_cache(self, request_id: str, channel: ReturnChannel) -> None:
        """Empty the prefix cache, and put a sample; or raise DriverError."""

    def sleep(self, request_id: str, channel: ReturnChannel, level: int = 1) -> None:
        """Finish open requests, free the pages' memory, at level 2 the weights' too, and put a
        sample; or raise DriverError."""

    def wake(self, request_id: str, channel: ReturnChannel, *, weights: bool = True, pages: bool = True) -> None:
        """Take that memory again, put the result and serve; or raise DriverError."""

    def pause(self, request_id: str, channel: ReturnChannel, mode: UpdateMode, *, clear_cache: bool) -> None:
        """Run no step, and put a sample when that is so; or raise DriverError."""

    def resume(self, request_id: str, channel: ReturnChannel) -> None:
        """Run steps again, and put a sample; or raise DriverError."""

    def update_weights(
        self,
        request_id: str,
        channel: ReturnChannel,
        source: WeightSource,
        mode: UpdateMode,
        *,
        keep_cache: bool,
        name: str,
    ) -> None:
        """Serve other weights, and put a sample with their version; or raise DriverError."""

    def profile(self, request_id: str, directory: str | None, channel: ReturnChannel) -> None:
        """Begin a trace, or end it without a directory, and put a sample; or raise DriverError."""
