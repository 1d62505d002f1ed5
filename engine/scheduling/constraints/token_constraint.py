"""What may follow the tokens of a sequence: a mask, and a descriptor to wait at for the next."""

from collections.abc import Sequence as ListOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """The rule that the output of one sequence follows, computed elsewhere while the device works.

    It has a mask from the beginning. After ``advance`` it has none until ``hear`` has found the
    answer, which may also be that the output is complete or that nobody can say. One thread uses
    it.
    """

    @property
    def mask(self) -> NDArray[np.int32]:
        """i32[ceil(vocab / 32)] tokens that may be next: token i is bit i % 32 of word i // 32."""

    @property
    def expected(self) -> ListOf[int]:
        """Tokens that are likely to be next, behind those that it has answered to: drafts."""

    @property
    def num_forced(self) -> int:
        """How many of these, the first ones, leave no other text; the others are guesses."""

    @property
    def guess_acceptance(self) -> float:
        """From 0 to 1: how often a guess was right of late, behind others that were."""

    @property
    def expected_masks(self) -> ListOf[NDArray[np.int32]]:
        """Masks as ``mask`` behind the first of these, the first two, and so on, as far as known:
        perhaps not behind all."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but the end."""

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on, for the client."""

    def advance(self, *token_ids: int, guess: ListOf[int] = ()) -> None:
        """The next tokens have landed; returns at once. What it then expects are the tokens of a
        ``guess`` that may follow these, unless it forces others."""

    def hear(self, received: set[object]) -> bool:
        """Whether the answer has come; returns at once.

        Where several constraints get their answers through one connection, that is read once for
        all that are asked with the same set: it has what was read.
        """

    def fileno(self) -> int:
        """Readable where an answer has come that ``hear`` has not found yet."""

    @property
    def internal(self) -> bool:
        """Whether the error is not the request's own fault."""

    def suspend(self) -> None:
        """The sequence was preempted, and its next token may take long. The mask, or the answer
        to come, is kept."""

    def close(self) -> None:
        """The sequence has ended; a second time changes nothing."""
