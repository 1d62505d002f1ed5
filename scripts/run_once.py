"""A completion from a daemon that lives for it alone: starts one, streams, stops it."""

import sys
import tempfile

from ipc.client import Client, OdriverError
from ipc.control_client import ControlClient
from scripts.processes import end_on_sigterm, odriver


def main(prompt: str) -> int:
    """Print the prompt and what the model makes of it. The exit code is the daemon's own where that failed."""
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/odriver.sock"
        try:
            with odriver("serve", "--bind", address) as daemon, Client(address) as client:
                with ControlClient(address) as control:
                    control.set_log_level("warning")  # it would go on in the middle of the text
                print(prompt, end="", flush=True)
                for piece in client.generate(prompt):
                    print(piece.text, end="", flush=True)
                print()
        except OdriverError as error:
            print(f"odriver: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return daemon.process.returncode


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
