"""Every attack, beside honest clients: what each cost them, and which of them got through."""

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from types import TracebackType
from typing import Any, Self

import msgspec

from ipc.errors import OdriverError
from scripts.benchmarks.figures.figure import MILLISECONDS, Figure, MeasurementFailed, figure
from scripts.benchmarks.hostile.catalogue import ATTACKS
from scripts.benchmarks.hostile.endings import ENDINGS, hang_up_on_start
from scripts.benchmarks.hostile.honest import Report
from scripts.benchmarks.hostile.registry import Attack
from scripts.benchmarks.hostile.stand import Held, Stand
from scripts.benchmarks.processes.child import Child, ChildFailed

ATTACKER, HONEST = "scripts.benchmarks.hostile.attacker", "scripts.benchmarks.hostile.honest"
SECONDS = 4.0
"""Of each attack."""
PATIENCE = 40.0
"""Seconds beyond, after which an attack or an honest client is taken for never coming to an end."""
SLOWDOWN = 3.0
"""How much longer an honest client may wait beside an attack than beside as many ordinary clients."""
LEAST = 0.1
"""Seconds that nobody complains of, whatever they are a multiple of."""
QUOTED = 3


class HostileFailed(MeasurementFailed):
    """Attacks got through; the message names them."""


def measure_hostile(seconds: float, only: str) -> Iterator[Figure]:
    """A figure for each attack whose name has ``only`` in it; at the end HostileFailed if any got through."""
    through: list[str] = []
    if not only:
        through += filter(None, [hang_up_on_start()])
    for keyed in (False, True):
        with Siege(seconds, keyed=keyed) as siege:
            for attack in ATTACKS:
                if attack.target in siege.targets and only in attack.name:
                    yield siege.play(attack)
            if not only:
                siege.end()
            through += siege.through
    yield figure("hostile", "attacks that got through", "", [len(through)], more_is_better=False)
    if through:
        raise HostileFailed(f"{len(through)} attacks got through:\n" + "\n".join(through))


class Siege:
    """A stand and its honest clients, both new after an attack that has ended one of them or left something behind."""

    def __init__(self, seconds: float, *, keyed: bool) -> None:
        self.through: list[str] = []
        """Attacks that got through, and how."""
        self._seconds = seconds
        self._keyed = keyed
        self._usual: dict[tuple[str, int], float] = {}
        """Seconds that a small request takes beside so many ordinary clients, by target."""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @property
    def targets(self) -> Sequence[str]:
        """What can be attacked here."""
        return list(self._stand.doors)

    def play(self, attack: Attack) -> Figure:
        """What a small request takes beside the attack, and beside as many ordinary clients."""
        usual = self._usual_seconds(attack.target, attack.clients)
        before = self._stand.held()
        report, said = self._run(attack.name, attack.target)
        wrong = [*filter(None, [said]), *report.wrong[:QUOTED]]
        took = median(report.latencies) if report.latencies else math.inf
        if took > max(SLOWDOWN * usual, LEAST):
            wrong.append(
                f"a small request took {took:.2f} s beside it, and {usual:.3f} s beside as many ordinary clients"
            )
        if left := self._left_behind(before):
            wrong.append(left)
        if wrong:
            self._note(f"{attack.target}: {attack.name}: {'; '.join(wrong)}")
        if left or not report.latencies:
            self._stack.close()
            self._begin()
        others = {"ordinary clients": [MILLISECONDS * usual]}
        runs = [MILLISECONDS * each for each in report.latencies] or [math.inf]
        return figure(f"hostile {attack.target}", attack.name, "ms", runs, more_is_better=False, others=others)

    def end(self) -> None:
        """What ends the daemon, or is to."""
        for target, (name, run) in ENDINGS.items():
            if target in self._stand.doors and (wrong := run(self._stand)):
                self._note(f"{target}: {name}: {wrong}")

    def _note(self, through: str) -> None:
        self.through.append(through)
        print(f"scripts/bench: got through: {through}", file=sys.stderr)

    def _begin(self) -> None:
        with ExitStack() as stack:
            self._stand = stack.enter_context(Stand(keyed=self._keyed))
            self._honest = {
                target: stack.enter_context(_killed(Child(HONEST, door.address, self._stand.key, door.url)))
                for target, door in self._stand.doors.items()
            }
            for target in self._honest:
                self._report(target, 1.0)  # the first of all that is asked takes longer
            self._stack = stack.pop_all()

    def _usual_seconds(self, target: str, clients: int) -> float:
        if (target, clients) not in self._usual:
            report, said = self._run(str(clients), target)
            if said or report.wrong or not report.latencies:
                raise HostileFailed(f"beside {clients} ordinary clients: {said} {report.wrong[:QUOTED]}")
            self._usual[target, clients] = median(report.latencies)
        return self._usual[target, clients]

    def _run(self, name: str, target: str) -> tuple[Report, str]:
        """Have one attack, and honest clients ask; what became of these, and what the attack says that it did."""
        door = msgspec.structs.replace(self._stand.doors[target], seconds=self._seconds)
        said: list[str] = []

        def attack() -> None:
            with Child(ATTACKER, name, target) as child, _deadline(child, self._seconds + PATIENCE):
                said.append(_asked(child, door, str, "the attack came to no end"))

        thread = threading.Thread(target=attack)
        thread.start()
        report = self._report(target, self._seconds)
        thread.join()
        return report, said[0]

    def _report(self, target: str, seconds: float) -> Report:
        child = self._honest[target]
        with _deadline(child, seconds + PATIENCE):
            failed = Report([], 0, [f"honest clients had no answer for {PATIENCE:g} s"])
            return _asked(child, seconds, Report, failed)  # type: ignore[no-any-return]

    def _left_behind(self, before: Held) -> str:
        if dead := self._stand.dead():
            return dead
        try:
            return self._stand.rest(before)
        except OdriverError as error:
            return f"its status: {error}"


@contextmanager
def _killed(child: Child) -> Iterator[Child]:
    """A child that at the end is not asked whether it has finished."""
    with child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def _deadline(child: Child, seconds: float) -> Iterator[None]:
    """Kill the child should this last longer."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _asked(child: Child, question: Any, answer: type, otherwise: Any) -> Any:
    try:
        return child.ask(question, answer)
    except ChildFailed:
        return otherwise
