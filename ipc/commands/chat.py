"""A conversation in the terminal."""

import sys
from contextlib import suppress

from ipc.client import Client, Message
from ipc.errors import RequestFailed
from ipc.wire.escaping import one_line, write

LEAVE = "/exit"


def converse(client: Client) -> None:
    """Converse until /exit or the end of the input. Ctrl-C stops a reply and keeps its text."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and knows the last ones
        write(f"This is {client.welcome.model}. {LEAVE} or Ctrl-D leaves, Ctrl-C stops a reply.")
    history: list[Message] = []
    while (said := _ask("> " if interactive else "")) is not None:
        if said.strip():
            history = _answered(client, [*history, {"role": "user", "content": said}], history)


def _ask(prompt: str) -> str | None:
    """The user's next message; None to leave."""
    while True:
        try:
            said = input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(f"\n{LEAVE} or Ctrl-D leaves.")
            continue
        return None if said.strip() == LEAVE else said


def _answered(client: Client, history: list[Message], before: list[Message]) -> list[Message]:
    """The history with the reply, printed as it came; the history before if there is no reply."""
    reply = ""
    try:
        with client.chat(history) as pieces:
            for piece in pieces:
                reply += piece.text
                write(piece.text, end="")
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestFailed as error:
        print(f"odriver: {one_line(str(error))}", file=sys.stderr)
        return before
    print()
    return [*history, {"role": "assistant", "content": reply}]
