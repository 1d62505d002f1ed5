"""A constraint that answers at once."""

import numpy as np


class EveryThird:
    """Allows every third token, and after each another third."""

    complete, error, internal = False, None, False
    expected = expected_masks = ()
    num_forced, guess_acceptance = 0, 0.5

    def __init__(self, vocab_size):
        self._vocab_size, self._turn = vocab_size, 0

    @property
    def mask(self):
        """See TokenConstraint."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[self._turn % 3 : self._vocab_size : 3] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_id, guess=()):  # noqa: ARG002
        """See TokenConstraint."""
        assert token_id % 3 == self._turn % 3
        self._turn += 1

    def hear(self, received):  # noqa: ARG002
        """See TokenConstraint."""
        return True

    def suspend(self):
        """See TokenConstraint."""

    def close(self):
        """See TokenConstraint."""
