"""Some of the soak's clients, a process of their own, which may be killed: each asks one thing after the other."""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ipc.client import Client
from ipc.errors import OdriverError, RequestFailed
from ipc.wire.completion import Piece
from scripts.benchmarks.endurance.soak_requests import Ask, Choice, Ending
from scripts.benchmarks.processes.child import answer_all


def main() -> None:
    """Serve as a child: an Ask list for each client a line, answered by the Endings of each."""
    clients = [Client(sys.argv[1]) for _ in range(int(sys.argv[2]))]
    with ThreadPoolExecutor(len(clients)) as threads:
        answer_all(lambda question: list(threads.map(_ask_all, clients, msgspec.convert(question, list[list[Ask]]))))


def _ask_all(client: Client, asks: list[Ask]) -> list[Ending]:
    return [ask_one(client, ask) for ask in asks]


def ask_one(client: Client, ask: Ask) -> Ending:
    """Ask, listen as long as the request is to live, and say how it ended."""
    ending = Ending({})
    try:
        if ask.stream:
            stream = client.generate(ask.prompt, **ask.sampling)
            _listen(stream, ending, ask.abort_after)
            stream.close()
        else:
            for index, choice in enumerate(client.complete(ask.prompt, **ask.sampling).choices):
                ending.choices[index] = Choice(choice.text, choice.token_ids, choice.finish_reason)
    except RequestFailed as error:
        ending.error = error.code
    except OdriverError as error:
        ending.wrong = str(error)
    if not (ending.error or ending.aborted or ending.wrong):
        ended = [choice.finish_reason for choice in ending.choices.values()]
        if None in ended or len(ended) != ask.params.get("n", 1):
            ending.wrong = f"samples ended with {ended}"
    return ending


def _listen(pieces: Iterable[Piece], ending: Ending, abort_after: int | None) -> None:
    if abort_after == 0:
        ending.aborted = True
        return
    for number, piece in enumerate(pieces, start=1):
        choice = ending.choices.setdefault(piece.index, Choice())
        if choice.finish_reason is not None:
            ending.wrong = f"a sample that had ended with {choice.finish_reason} spoke again"
        choice.text += piece.text
        choice.token_ids = choice.token_ids + piece.token_ids
        choice.finish_reason = piece.finish_reason
        if number == abort_after and piece.usage is None:
            ending.aborted = True
            return


if __name__ == "__main__":
    main()
