"""``odriver complete``: the text goes on, or several do."""

import argparse
import sys
from typing import Any

import msgspec

from driver.request import Usage
from ipc.client import Client
from ipc.commands import which_daemon
from ipc.commands.requests import sampling_flags, timings
from ipc.wire import escaping

CUT_OFF = {"timeout": "the time of --timeout-s is over", "abort": "the daemon's operator has ended it"}
"""What to say of a text that neither the model nor a limit of tokens has ended, by its finish reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, the daemon and the sampling parameters."""
    add = parser.add_argument
    add("prompt", nargs="?", default=None, metavar="PROMPT", help="the text to continue (default: what stdin says)")
    which_daemon.add_arguments(parser)
    which_daemon.add_model_argument(parser)
    timings.add_argument(parser)
    sampling_flags.add_arguments(parser)
    add("--json", action="store_true", default=False, help="everything there is, as JSON")


def run(options: dict[str, Any]) -> int:
    """Print the completion; the exit code."""
    with which_daemon.client(options) as client:
        prompt, as_json, timed = options.pop("prompt"), options.pop("json"), options.pop("timings")
        params = sampling_flags.take_params(options)
        usage = _show(client, _read_prompt() if prompt is None else prompt, params, json=as_json)
    if timed and usage is not None:
        timings.show(usage)
    return 0


def _read_prompt() -> str:
    """All of stdin, less the newline that ends a line."""
    if sys.stdin.isatty():
        print("odriver: type the prompt, then Ctrl-D", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def _show(client: Client, prompt: str, params: dict[str, Any], *, json: bool) -> Usage | None:
    """Print a completion: as it comes, or, where it is more than one text, when it is whole.

    Returns what it cost.
    """
    if json or "logprobs" in params or "prompt_logprobs" in params:
        whole = client.complete(prompt, **params)
        escaping.write(escaping.visible_json(msgspec.json.format(msgspec.json.encode(whole)).decode()))
        return whole.usage
    if params.get("n", 1) > 1:
        whole = client.complete(prompt, **params)
        for choice in whole.choices:
            escaping.write(f"[{choice.index}] {choice.text}")
        return whole.usage
    usage = reason = None
    with client.generate(prompt, **params) as pieces:
        for piece in pieces:
            usage, reason = piece.usage, piece.finish_reason
            escaping.write(piece.text, end="")
    print()
    if reason in CUT_OFF:
        print(f"odriver: the text was cut off here: {CUT_OFF[reason]}", file=sys.stderr)
    return usage
