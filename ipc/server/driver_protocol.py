"""The sockets' interface of a driver."""

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from driver.request import ActiveRequest, RequestOrder, TokenizerRequest

if TYPE_CHECKING:
    from driver.adapters.registry import AdapterRegistry
    from driver.metrics.request_listing import RequestRow
    from driver.operations.operator_commands import OperatorCommands


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
    def operations(self) -> "OperatorCommands":
        """What operators have it do."""
