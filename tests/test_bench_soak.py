"""scripts/bench soak and fairness: what they ask, what they hold answers against, and a short run of each."""

import msgspec
import pytest

from caching.page_manager import HBMPageManager
from driver.request import Usage
from driver.request_parameters import sampling_params
from ipc.wire.completion import Piece
from scripts.benchmarks.endurance import soak
from scripts.benchmarks.endurance.soak import SoakFailed, agrees, check_histories, measure_soak
from scripts.benchmarks.endurance.soak_client import ask_one
from scripts.benchmarks.endurance.soak_requests import ABORTED, Ask, Choice, greedy_cases, random_asks
from scripts.benchmarks.processes.footprint import Footprint

pytestmark = pytest.mark.thorough

USAGE = Usage(1, 2)


class OnePromptClient:
    """Answers everything with the same pieces, and notes when it is closed."""

    def __init__(self, *pieces):
        self._pieces = pieces

    def generate(self, prompt, **params):
        del prompt, params
        return Pieces(self._pieces)


class Pieces(list):
    """A stream."""

    def close(self):
        pass


def build_ask(**settings):
    """A greedy request, streamed."""
    return Ask(prompt="x", params=settings.pop("params", {"max_tokens": 2}), **settings)


def test_the_soak_asks_only_what_is_allowed_and_aborts_a_fifth():
    """Every parameter passes the driver's own check, also after its way through JSON."""
    asks = random_asks(greedy_cases(), 2000, seed=1)

    for ask in msgspec.json.decode(msgspec.json.encode(asks), type=list[Ask]):
        sampling_params(ask.sampling, {})

    assert sum(ask.abort_after is not None for ask in asks) / len(asks) == pytest.approx(ABORTED, abs=0.05)


def test_an_answer_is_put_together_from_its_pieces():
    """Text, ids and the reason, by sample."""
    client = OnePromptClient(
        Piece("a", [1], index=1), Piece("b", [2]), Piece("c", [3], "stop"), Piece("", [], "length", USAGE, 1)
    )

    ending = ask_one(client, build_ask(params={"n": 2}))

    assert ending.wrong is None and ending.reason == "stop"
    assert ending.choices == {0: Choice("bc", [2, 3], "stop"), 1: Choice("a", [1], "length")}


@pytest.mark.parametrize(
    ("pieces", "wrong"),
    [
        ([Piece("a", [1], "stop"), Piece("b", [2], "stop", USAGE)], "that had ended with stop spoke again"),
        ([Piece("a", [1])], "samples ended with [None]"),
        ([], "samples ended with []"),
    ],
)
def test_an_end_too_many_or_none_is_seen(pieces, wrong):
    """A sample has one end, and no word after it."""
    assert wrong in ask_one(OnePromptClient(*pieces), build_ask()).wrong


def test_a_request_is_aborted_after_some_pieces():
    """Unless the last of them was its end."""
    pieces = [Piece("a", [1]), Piece("b", [2]), Piece("c", [3], "length", USAGE)]

    endings = [ask_one(OnePromptClient(*pieces), build_ask(abort_after=count)) for count in (0, 2, 3)]

    assert [ending.reason for ending in endings] == ["abort", "abort", "length"]
    assert [ending.wrong for ending in endings] == [None] * 3


def test_an_answer_agrees_with_the_one_alone_as_far_as_it_came():
    """A whole one is equal, and one that was cut off is its beginning."""
    alone = Choice("abc", [1, 2, 3], "length")

    assert agrees(Choice("abc", [1, 2, 3], "length"), alone)
    assert agrees(Choice("ab", [1, 2], "timeout"), alone) and agrees(Choice(), alone)
    assert not agrees(Choice("abc", [1, 2, 3], "stop"), alone)
    assert not agrees(Choice("ab", [1, 2], "length"), alone)
    assert not agrees(Choice("ac", [1, 3], "timeout"), alone)


@pytest.mark.parametrize(
    ("threads", "files", "megabytes", "why"),
    [(9, 20, 100.0, "holds more"), (8, 21, 100.0, "holds more"), (8, 20, 106.0, "grew from 100 to 106 MB")],
)
def test_a_daemon_that_holds_more_at_the_end_fails_the_soak(threads, files, megabytes, why):
    """Threads, files or memory."""
    before = Footprint(8, 20, 100.0)

    assert len(list(soak._footprints(before, Footprint(8, 19, 104.0), 60.0))) == 3
    with pytest.raises(SoakFailed, match=why):
        list(soak._footprints(before, Footprint(threads, files, megabytes), 60.0))


def test_a_history_that_breaks_a_rule_fails_the_soak(monkeypatch):
    """It says which, by its seed."""
    monkeypatch.setattr(HBMPageManager, "num_owned", 1)

    with pytest.raises(SoakFailed, match="of seed 0: a page is lost"):
        list(check_histories(200))


def test_a_short_soak_shows_what_a_long_one_does(monkeypatch):
    """A real daemon whose device fails and whose pool is short, and aborts: all of it holds. Kills take half a minute."""
    monkeypatch.setattr(soak, "SETTINGS", ("--max-num-seqs", "6", "--max-num-batched-tokens", "64"))
    for name, value in {"MORE_THREADS": 8, "MORE_FILES": 8, "MORE_MEMORY": 0.5}.items():
        monkeypatch.setattr(soak, name, value)  # its pools and caches are still being filled
    monkeypatch.setattr(soak, "FAULT_EVERY", 40)
    for name, value in {"CASES": 12, "LONGEST_PROMPT": 60, "LONGEST_OUTPUT": 24}.items():
        monkeypatch.setattr(f"scripts.benchmarks.endurance.soak_requests.{name}", value)

    figures = {figure.name: figure.value for figure in measure_soak(requests=200, clients=10, processes=2, kills=0)}

    answered = sum(count for name, count in figures.items() if name.startswith("ended with"))
    assert answered + figures["of clients that were killed"] == 200
    assert figures["whole greedy samples, all equal to those alone"] > 40
    assert figures["failed steps"] > 0
