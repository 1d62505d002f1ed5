"""Finding what a regular expression matches in text that comes in pieces, in time linear in the text.

A pattern is read by Python's own parser and becomes a nondeterministic automaton of at most MAX_STATES states, which are
followed side by side (Thompson 1968): a character costs at most a look at each state, whatever the pattern, and it is
always known how far back a match may have begun. What such an automaton can't do (anchors, lookaround,
backreferences) is refused by name.
"""

import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_STATES = 512

ACCEPT = -1
Test = Callable[[str], bool]
"""Whether a state lets a character pass."""

_CATEGORIES: dict[Any, Test] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    sre.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    sre.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    sre.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class StopRegex:
    """A compiled pattern. Raises ValueError with what is wrong; the flags it knows are ``(?i)`` and ``(?s)``."""

    def __init__(self, pattern: str) -> None:
        try:
            parsed = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        self._pattern = pattern
        self._ignores_case = bool(parsed.state.flags & re.IGNORECASE)
        self._dot_all = bool(parsed.state.flags & re.DOTALL)
        if parsed.state.flags & (re.MULTILINE | re.VERBOSE | re.ASCII | re.LOCALE):
            raise ValueError(f"{pattern!r} has flags other than i and s")
        self._states: list[tuple[Test | None, list[int]]] = []
        """What lets a character pass, None where none is read, and the states that follow."""
        entry = self._chain(parsed, ACCEPT)
        self.first = self._closure([entry])
        if ACCEPT in self.first:
            raise ValueError(f"{pattern!r} matches the empty text")
        self.steps = [(test, self._closure(follows)) for test, follows in self._states]

    def _state(self, test: Test | None, follows: list[int]) -> int:
        if len(self._states) == MAX_STATES:
            raise ValueError(f"{self._pattern!r} is too large: an automaton for it has more than {MAX_STATES} states")
        self._states.append((test, follows))
        return len(self._states) - 1

    def _chain(self, nodes: Any, follows: int) -> int:
        """The state where these nodes in a row begin, which lead to ``follows``."""
        for operation, argument in reversed(list(nodes)):
            follows = self._node(operation, argument, follows)
        return follows

    def _node(self, operation: Any, argument: Any, follows: int) -> int:
        match operation:
            case sre.LITERAL | sre.NOT_LITERAL | sre.ANY | sre.IN:
                return self._state(self._test(operation, argument), [follows])
            case sre.BRANCH:
                return self._state(None, [self._chain(branch, follows) for branch in argument[1]])
            case sre.SUBPATTERN if not argument[1] and not argument[2]:
                return self._chain(argument[3], follows)
            case sre.MAX_REPEAT | sre.MIN_REPEAT:
                least, most, repeated = argument
                return self._repeat(least, most, repeated, follows)
        raise ValueError(f"{self._pattern!r} has {str(operation).lower()}, which a stop_regex cannot have")

    def _repeat(self, least: int, most: Any, nodes: Any, follows: int) -> int:
        if most is sre.MAXREPEAT:
            loop = self._state(None, [follows])
            self._states[loop][1].append(self._chain(nodes, loop))
            follows = loop
        else:
            end = follows
            for _ in range(most - least):
                follows = self._state(None, [self._chain(nodes, follows), end])
        for _ in range(least):
            follows = self._chain(nodes, follows)
        return follows

    def _test(self, operation: Any, argument: Any) -> Test:
        if operation is sre.ANY:
            return bool if self._dot_all else "\n".__ne__
        items = argument if operation is sre.IN else [(sre.LITERAL, argument)]
        negated = operation is sre.NOT_LITERAL or items[0][0] is sre.NEGATE
        tests = [_item_test(*item) for item in items if item[0] is not sre.NEGATE]
        if self._ignores_case:
            return lambda char: (
                any(test(case) for test in tests for case in (char, char.lower(), char.upper())) != negated
            )
        return lambda char: any(test(char) for test in tests) != negated

    def _closure(self, states: list[int]) -> tuple[int, ...]:
        """The states among and behind these that read a character, and ACCEPT."""
        seen, found, stack = set(states), [], list(states)
        while stack:
            state = stack.pop()
            if state == ACCEPT or self._states[state][0] is not None:
                found.append(state)
                continue
            new = [follows for follows in self._states[state][1] if follows not in seen]
            seen.update(new)
            stack += new
        return tuple(found)


class StopRegexSearch:
    """One text's search for one pattern; places are counted in characters from the text's beginning."""

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._threads: dict[int, int] = {}
        """By state that a match may be in, where that match began; the earliest."""
        self._at = 0

    @property
    def held_from(self) -> int:
        """Where the earliest match that may still come of the text began; the text's end if there is none."""
        return min(self._threads.values(), default=self._at)

    def add(self, piece: str) -> tuple[int, int] | None:
        """End and start of the first match to be complete, of several the one that began first."""
        for char in piece:
            start = self._step(char)
            self._at += 1
            if start is not None:
                return self._at, start
        return None

    def _step(self, char: str) -> int | None:
        for state in self._regex.first:
            self._threads.setdefault(state, self._at)
        reached: dict[int, int] = {}
        for state, start in self._threads.items():
            test, follows = self._regex.steps[state]
            if test is not None and test(char):
                for follow in follows:
                    if reached.get(follow, self._at + 1) > start:
                        reached[follow] = start
        matched = reached.pop(ACCEPT, None)
        self._threads = reached
        return matched


def _item_test(operation: Any, argument: Any) -> Test:
    if operation is sre.LITERAL:
        literal = chr(argument)
        return lambda char: char == literal
    if operation is sre.RANGE:
        low, high = chr(argument[0]), chr(argument[1])
        return lambda char: low <= char <= high
    return _CATEGORIES[argument]
