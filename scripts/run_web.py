"""A daemon and a gateway with its page, which live until Ctrl-C."""

import socket
import sys
import tempfile

from scripts.processes import end_on_sigterm, odriver, wait_for_first

HOST, PORT = "127.0.0.1", 8000
"""Where the page is; at any port that is free if another program has this one."""
DRAIN = ("--drain-timeout", "2")
"""What is open when it ends has so many seconds."""


def main(flags: list[str]) -> int:
    """Serve with these flags of ``odriver serve``. The exit code is that of whichever of the two ends by itself."""
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/odriver.sock"
        where = ("--connect", address, "--host", HOST, "--port", str(_port()))
        try:
            with (
                odriver("serve", *DRAIN, *flags, "--bind", address) as daemon,
                odriver("gateway", *where, *DRAIN) as gateway,
            ):
                print(f"\nTalk to it at {gateway.status}/ and end it with Ctrl-C", flush=True)
                return wait_for_first(daemon.process, gateway.process)
        except KeyboardInterrupt:
            print()
            return 0


def _port() -> int:
    """The usual one if nothing listens there."""
    with socket.socket() as tried:
        return 0 if tried.connect_ex((HOST, PORT)) == 0 else PORT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
