"""The first thing that ``odriver`` does, while nothing is imported yet that takes its time."""

import os
import signal
import sys

SERVERS = ("serve", "gateway")
"""Commands to which SIGHUP says that there is something to read again."""
NO_HOME = "/nonexistent"
"""HOME of a user that has none, as Debian has it: what would be kept there is not, with a reason."""


def main() -> int:
    """Run the command; returns the exit code.

    A server that gets SIGHUP, the signal to reload, before it has loaded anything continues its
    start. At a terminal SIGHUP means that the terminal is gone, and ends the process.
    """
    if sys.argv[1:2] and sys.argv[1] in SERVERS and not sys.stderr.isatty():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.path.expanduser("~") == "~":  # libraries would make a directory of that name
        os.environ["HOME"] = NO_HOME
    try:
        from ipc.commands import cli

        return cli.main()
    except KeyboardInterrupt:  # while that is imported
        return 128 + signal.SIGINT
