"""A completion from a daemon that lives for it alone: starts one, streams, stops it.

It imports next to nothing before the daemon is started, as that is what one waits for.
"""

import sys
import tempfile
import time

from scripts.processes import Starting, end_on_sigterm, starting

FLAGS = ["--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--staged-readiness", "--log-level", "warning"]
"""For a single request: few functions to compile. The log would go on amid its text."""


def main(prompt: str) -> int:
    """Print the prompt and what the model makes of it. The exit code is the daemon's own where that failed."""
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/odriver.sock"
        try:
            with starting("serve", "--bind", address, *FLAGS, TTY_COMPATIBLE="0") as daemon:
                _stream(daemon, address, prompt)
        except KeyboardInterrupt:
            return 130
    return daemon.process.returncode


def _stream(daemon: Starting, address: str, prompt: str) -> None:
    from caching.cache_directory import cache_home
    from ipc.client import Client
    from ipc.errors import OdriverError

    known = (cache_home() / "xla").is_dir()
    seconds = (
        "5 seconds" if known else "20 seconds, as the model is compiled for this machine: 5 from the second time on"
    )
    _tell(f"starting a daemon, which takes about {seconds}")
    daemon.wait(_Stages())
    try:
        with Client(address) as client:
            print(prompt, end="", flush=True)
            for piece in client.generate(prompt):
                print(piece.text, end="", flush=True)
            print()
    except OdriverError as error:
        sys.exit(f"odriver: {error}")


class _Stages:
    """Tells of each stage of a start when it begins."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stage = ""

    def __call__(self, status: str) -> None:
        """A STATUS such as "compiling: 3 of 19 functions"."""
        stage = status.partition(":")[0]
        if stage != self._stage:
            self._stage = stage
            _tell(f"{time.monotonic() - self._began:4.1f} s  {stage}")


def _tell(line: str) -> None:
    print(f"odriver: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
