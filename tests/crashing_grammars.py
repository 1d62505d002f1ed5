"""A first process of grammars whose workers break at certain tokens, as a fault of what follows grammars would have it."""

import os

from driver.grammars import worker_process
from driver.grammars.matcher import Matcher

ALLOCATION = 1 << 28


def main(dies: int, spins: int, swells: int) -> None:
    """Be that process: a matcher that is told the first token ends, at the second it comes to no end, at the third it
    has no memory left. One that looks ahead at a guess with any of them ends."""
    advance, look_ahead = Matcher.advance, Matcher.look_ahead

    def break_or_advance(self: Matcher, token_ids: list[int]) -> bytes | None:
        if dies in token_ids:
            os.abort()
        while spins in token_ids:
            pass
        eaten = []
        while swells in token_ids:
            eaten.append(bytes(ALLOCATION))
        return advance(self, token_ids)

    def break_or_look_ahead(self: Matcher, guess: list[int]) -> tuple[list[int], int, list[bytes]]:
        if self._num_drafts and not {dies, spins, swells}.isdisjoint(guess):
            os.abort()
        return look_ahead(self, guess)

    Matcher.advance = break_or_advance  # type: ignore[method-assign]
    Matcher.look_ahead = break_or_look_ahead  # type: ignore[method-assign]
    worker_process.main()
