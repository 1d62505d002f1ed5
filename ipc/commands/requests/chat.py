"""``odriver chat``: a conversation in the terminal."""

import argparse
import re
import sys
from contextlib import suppress
from typing import Any

from ipc.client import Client
from ipc.commands import which_daemon
from ipc.commands.requests import sampling_flags, timings
from ipc.errors import OdriverError, RequestFailed
from ipc.wire.completion import Message
from ipc.wire.escaping import one_line, write

HELP = """\
/system TEXT  what the model is to be, from now on; without TEXT, what that is
/clear        begin anew, with the same system message
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C stops a reply."""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The daemon, the system message and the sampling parameters of one sample."""
    which_daemon.add_arguments(parser)
    which_daemon.add_model_argument(parser)
    parser.add_argument("--system", default=None, metavar="TEXT", help="what the model is to be: a system message")
    timings.add_argument(parser)
    sampling_flags.add_arguments(parser, without=("n", "logprobs", "prompt_logprobs", "detokenize"))


def run(options: dict[str, Any]) -> int:
    """Converse until /exit or the end of the input; 1 if the last message got no reply."""
    with which_daemon.client(options) as client:
        system, timed = options.pop("system"), options.pop("timings")
        return Conversation(client, system, sampling_flags.take_params(options), timed=timed).run()


class Conversation:
    """What was said so far. Ctrl-C stops a reply and keeps its text; one that is refused or lost with its daemon is
    forgotten, and the next message is sent to the daemon that is there by then."""

    def __init__(self, client: Client, system: str | None, params: dict[str, Any], *, timed: bool) -> None:
        self._client = client
        self._system = system
        self._params = params
        self._timed = timed
        self._history: list[Message] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> int:
        """The exit code."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - input() then edits lines and knows the last ones
            write(f"This is {self._client.model}. /help says what there is beside talking.")
        code = 0
        while (line := self._read()) is not None:
            command = _COMMAND.fullmatch(line.strip())
            if command is not None:
                self._obey(command[1], command[2])
            elif line.strip():
                code = 0 if self._say(line) else 1
        return code

    def _read(self) -> str | None:
        """The user's next line; None to leave."""
        while True:
            try:
                line = input("> " if self._interactive else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D leaves.")
                continue
            return None if line.strip() == "/exit" else line

    def _obey(self, name: str, argument: str | None) -> None:
        match name:
            case "help":
                write(HELP)
            case "clear":
                self._history = []
            case "system" if argument is None:
                write(self._system or "there is no system message")
            case "system":
                self._system = argument
            case _:
                print(f"odriver: there is no /{name}: /help lists what there is", file=sys.stderr)

    def _say(self, text: str) -> bool:
        """Send a message and print the reply as it comes; whether there was one."""
        asked: list[Message] = [*self._history, {"role": "user", "content": text}]
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        reply, usage = "", None
        try:
            with self._client.chat(system + asked, **self._params) as pieces:
                for piece in pieces:
                    reply, usage = reply + piece.text, piece.usage
                    write(piece.text, end="")
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except OdriverError as error:
            if not (self._interactive or isinstance(error, RequestFailed)):
                raise  # nobody is there to wait for another daemon
            if reply:
                print()
            print(f"odriver: {one_line(str(error))}", file=sys.stderr)
            return False
        print()
        if self._timed and usage is not None:
            timings.show(usage)
        self._history = [*asked, {"role": "assistant", "content": reply}]
        return True
