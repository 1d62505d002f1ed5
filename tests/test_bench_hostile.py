"""scripts/bench hostile: what it takes for an attack that got through, and that its attacks and honest clients speak."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import FakeDriver, serving
from gateways import gateway

from scripts.benchmarks.hostile import attacker
from scripts.benchmarks.hostile.catalogue import ATTACKS, MODULES
from scripts.benchmarks.hostile.control import _look
from scripts.benchmarks.hostile.honest import Honest, Report
from scripts.benchmarks.hostile.measure import Siege
from scripts.benchmarks.hostile.registry import DAEMON, GATEWAY, KEYED, Attack, Door, GotThrough
from scripts.benchmarks.hostile.stand import Held

pytestmark = pytest.mark.thorough

HARMLESS = ("M1: forged lines of the log", "odd values", "M4: profiles elsewhere", "M5: drains that never are")
"""To a driver that answers all."""


def test_every_attack_says_what_it_does_and_is_there_once() -> None:
    """Of each target there are several, and of each finding of the review at least one."""
    assert max(Counter((attack.name, attack.target) for attack in ATTACKS).values()) == 1
    assert all(attack.run.__doc__ for attack in ATTACKS)
    assert {attack.run.__module__ for attack in ATTACKS} == {module.__name__ for module in MODULES}
    assert all(count > 5 for count in Counter(attack.target for attack in ATTACKS).values())
    assert {attack.target for attack in ATTACKS} == {DAEMON, GATEWAY, KEYED}
    named = " ".join(attack.name for attack in ATTACKS)
    for finding in (
        "C1",
        "C2",
        "C3",
        "C4",
        "C5",
        "H1",
        "H2",
        "H3",
        "H4",
        "H5",
        "H6",
        "M1",
        "M3",
        "M4",
        "M5",
        "M7",
        "M10",
        "M11",
        "M12",
    ):
        assert finding in named


@pytest.mark.parametrize("name", HARMLESS)
def test_attacks_are_answered(name: str, address: str, tmp_path: Path) -> None:
    """By a server that bears them; what they look for is not found."""
    with serving(address, FakeDriver(), profiles=tmp_path / "profiles"):
        assert attacker.run(name, DAEMON, Door(address, seconds=0.0)) == ""


def test_an_attack_that_is_not_answered_got_through(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which."""
    monkeypatch.setattr("scripts.benchmarks.hostile.peer.PATIENCE", 0.1)
    monkeypatch.setattr("scripts.benchmarks.hostile.peer.Peer.ask.__defaults__", (0.1,))
    with serving(address, FakeDriver()) as server:
        monkeypatch.setattr(server._control, "_hear", lambda *event: None)
        assert attacker.run("M4: profiles elsewhere", DAEMON, Door(address, seconds=0.0)).startswith("no answer within")


def test_a_forged_line_is_seen(tmp_path: Path) -> None:
    """At the beginning of one, and whatever a terminal obeys."""
    for said in ("ok\n2026-11-21 00:00:00,000 ERROR x: FORGED\n", "INFO x: \x1b[31m\n"):
        (tmp_path / "log").write_text(said)
        with pytest.raises(GotThrough):
            _look(Door("", logs=[str(tmp_path / "log")]))


def test_honest_clients_hear_what_they_are_to(address: str) -> None:
    """By ZeroMQ, and small requests over HTTP where there is a gateway; what is otherwise is told."""
    driver = FakeDriver()
    with serving(address, driver), gateway(address) as http:
        for url in ("", http.base_url.netloc.decode()):
            honest = Honest(address, "", url)
            report = honest.run(0.1)
            assert report.wrong == [] and report.streams >= 2 and len(report.latencies) >= 5
            honest._small = "something else"
            assert "and not 'something else'" in honest.run(0.0).wrong[0]


@pytest.mark.parametrize(
    ("report", "said", "left", "verdict"),
    [
        (Report([0.25, 0.29, 0.4], 2, []), "", "", None),
        (Report([0.35, 0.29, 0.4], 2, []), "", "", "0.35 s beside it, and 0.100 s beside as many"),
        (Report([0.1], 2, ["a stream: cut off"]), "", "", "a stream: cut off"),
        (Report([0.1], 2, []), "12 tokens for nothing", "", "12 tokens for nothing"),
        (Report([0.1], 2, []), "", "3 open_requests", "3 open_requests"),
        (Report([], 0, []), "", "", "inf s beside it"),
    ],
)
def test_an_attack_got_through_if_anybody_noticed(
    report: Report, said: str, left: str, verdict: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest clients by more than three times of their time, by a wrong text or none, or the machine by what is left."""
    siege = Siege(1.0, keyed=False)
    begun: list[int] = []
    stand: Any = SimpleNamespace(held=lambda: Held(0.0, 0), dead=lambda: "", rest=lambda before: left)
    for name, fake in {
        "_stand": stand, "_stack": SimpleNamespace(close=lambda: None), "_begin": lambda: begun.append(1),
        "_run": lambda name, target: (report, said), "_usual": {("daemon", 1): 0.1},
    }.items():  # fmt: skip
        monkeypatch.setattr(siege, name, fake, raising=False)

    figure = siege.play(Attack("C9: a new one", "daemon", 1, lambda door: None))

    assert figure.others["ordinary clients"] == 100.0
    assert [verdict in words for words in siege.through] == ([] if verdict is None else [True])
    assert len(begun) == bool(left or not report.latencies)
