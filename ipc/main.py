"""The first thing that ``odriver`` does, while nothing is imported yet that takes its time."""

import signal
import sys

SERVERS = ("serve", "gateway")
"""Commands to which SIGHUP says that there is something to read again."""


def main() -> int:
    """The exit code of the command.

    A server that is told to read its files again before it has read them at all goes on with its start. At a terminal
    SIGHUP says that the terminal is gone, and ends it.
    """
    if sys.argv[1:2] and sys.argv[1] in SERVERS and not sys.stderr.isatty():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from ipc.commands import cli

    return cli.main()
