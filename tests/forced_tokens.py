"""A constraint whose masks are late and mostly of one token, which says so: for tests of forced drafts."""

import hashlib

import numpy as np
from test_oengine import SomeTokens


class ForcedTokens(SomeTokens):
    """Allows one token behind most tokens, and some behind others: all tokens before count.

    With each answer it says what it expects, wrong now and then, of which it says that it forces some, and knows some of
    the masks.
    """

    def __init__(self, delay, vocab_size, most_drafts, *, never=0):
        self._vocab_size, self._most, self._never = vocab_size, most_drafts, never
        self._guess = []
        self.most_at_once = self.num_guesses = 0
        super().__init__(delay)
        self._force()

    def allowed_after(self, tokens):
        """Their ids."""
        one, several, count, *_ = hashlib.blake2b(repr(tokens).encode()).digest()
        allowed = [one] if count % 4 else range(several % 5, self._vocab_size, 5)
        return [token % self._vocab_size for token in allowed if token % self._vocab_size != self._never] or [1]

    def mask_after(self, tokens):
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[self.allowed_after(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, *token_ids, guess=()):
        super().advance(*token_ids)
        self._guess = list(guess)
        self.most_at_once = max(self.most_at_once, len(token_ids))

    def hear(self, received):
        heard = super().hear(received)
        if heard:
            self._force()
        return heard

    def _force(self):
        tokens, masks = list(self.told), []
        for _ in range(2 * self._most + 1):
            wrong = hashlib.blake2b(repr(("wrong", tokens)).encode()).digest()[0] % 8 == 0
            tokens.append(self._never + 1 if wrong else self.allowed_after(tokens)[0])
            masks.append(self.mask_after(tokens))
        self.expected = tokens[len(self.told) :]
        self.num_forced = len(self.told) % len(self.expected)
        self.expected_masks = masks[: len(tokens) % (self._most + 1)]


class MostTokens(ForcedTokens):
    """Allows two tokens of three, others behind each text, and forces some now and then, beside which it expects no guess."""

    def allows(self, tokens):
        """bool[vocab_size] which may follow these."""
        one, *_ = hashlib.blake2b(repr(tokens).encode()).digest()
        allows = (np.arange(self._vocab_size) + one) % 3 != 0
        allows[self._never] = False
        return allows

    def allowed_after(self, tokens):
        return np.flatnonzero(self.allows(tokens)).tolist()

    def _force(self):
        if not self._guess or len(self.told) % 4 == 0:
            super()._force()
            return
        tokens, masks = list(self.told), []
        for token_id in self._guess:
            if not self.allows(tokens)[token_id]:
                break
            tokens.append(token_id)
            masks.append(self.mask_after(tokens))
        self.expected, self.num_forced = tokens[len(self.told) :], 0
        self.expected_masks = masks[: self._most]
        self.num_guesses += len(self.expected)
