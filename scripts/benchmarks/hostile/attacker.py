"""One attack, or clients that mean no harm, in a process of its own, with connections of its own that end with it."""

import sys
import threading
import time

from ipc.client import Client
from scripts.benchmarks.hostile import catalogue
from scripts.benchmarks.hostile.peer import post
from scripts.benchmarks.hostile.registry import Door, GotThrough
from scripts.benchmarks.processes.child import answer_all

MAX_TOKENS = 32


def main() -> None:
    """Serve as a child: each question is a Door, answered by what got through, or nothing."""
    name, target = sys.argv[1], sys.argv[2]
    answer_all(lambda question: run(name, target, Door(**question)))


def run(name: str, target: str, door: Door) -> str:
    """Attack while there is time, once at least."""
    until = time.monotonic() + door.seconds
    if name.isdigit():
        behave(door, int(name), until)
        return ""
    found = next(each for each in catalogue.ATTACKS if (each.name, each.target) == (name, target))
    try:
        while True:
            found.run(door)
            if time.monotonic() >= until:
                return ""
            time.sleep(0.01)
    except GotThrough as through:
        return str(through)


def behave(door: Door, clients: int, until: float) -> None:
    """So many clients ask one ordinary thing after the other."""
    threads = [threading.Thread(target=_ask, args=(door, number, until)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(door: Door, number: int, until: float) -> None:
    prompt, params = f"Once upon a time {number}", {"max_tokens": MAX_TOKENS, "temperature": 0}
    if door.url:
        while time.monotonic() < until:
            post(door, "/v1/completions", {"prompt": prompt, **params})
        return
    with Client(door.address, key=door.keys.get("plain")) as client:
        while time.monotonic() < until:
            client.complete(prompt, **params)


if __name__ == "__main__":
    main()
