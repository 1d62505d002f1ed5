"""Token ids to text, a few at a time, as if all of them had been decoded at once.

Tokens cannot be decoded one by one: a character may be spread over several, and many tokenizers
drop the space in front of the first word they see. So each new token is decoded together with a
window of those before it, and what is new of the window's text is the piece. Text that ends in
U+FFFD may be half a character and waits for its other half.
"""

from collections.abc import Iterable

from driver.text.tokenizer import HuggingFaceTokenizer

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""Tokens of an unfinished character: three of its four bytes, one byte a token."""
MAX_WINDOW = 16
CONTEXT = 8
"""Tokens to keep of a window without the end of a character: two characters."""
PROMPT_TAIL = 32
"""Tokens of the prompt to pass to a Detokenizer: a window, and some special ones."""


class Detokenizer:
    """The text of one request. Concatenated, its pieces are ``decode(prompt + output)`` without
    ``decode(prompt)``.

    Bytes that are no UTF-8 become U+FFFD once the text after them, or three more such tokens, show
    it. A token costs the decoding of a window. With ``special`` special tokens are shown as well,
    and without ``spaces`` the tokenizer puts no space between two of them.
    """

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, prompt_tail: list[int], *, special: bool = False, spaces: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = not special
        self._joins = special and not spaces
        self._after_special = False
        self._window = self._first_window(prompt_tail)
        self._prompt = self._decoded(self._window)
        self._sent = self._prompt.rstrip(REPLACEMENT)
        """The part of the window's text that has been returned."""
        self._boundary = 0
        """Where the window can be cut: a character starts here, the text before was returned."""
        self._held = 0
        """Tokens at the window's end that may hold an unfinished character."""

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        add = self._add_joined if self._joins else self._add
        return "".join([add(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def flush(self) -> str:
        """The text held back, at the end: an unfinished character is U+FFFD."""
        return self._unsent(self._decoded(self._window))

    def _decoded(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _is_visible(self, token_id: int) -> bool:
        return self._tokenizer.is_visible(token_id) or (not self._skip and self._tokenizer.is_special(token_id))

    def _add_joined(self, token_id: int) -> str:
        """As ``_add``, but decodes a special token apart from the one before."""
        special = self._tokenizer.is_special(token_id)
        joined, self._after_special = special and self._after_special, special
        if not joined:
            return self._add(token_id)
        held = self.flush()
        self._restart(len(self._window))
        self._held = 0
        return held + self._add(token_id)

    def _add(self, token_id: int) -> str:
        if self._held == 0:
            self._boundary = len(self._window)
        self._window.append(token_id)
        text = self._decode()
        settled = text.rstrip(REPLACEMENT)
        piece = self._unsent(settled)
        self._held = 0 if settled == text else 1 if piece else self._held + 1
        if self._held > MAX_HELD:
            piece = self._give_up()
        self._trim()
        return piece

    def _decode(self) -> str:
        """The window's text, which starts with what was sent.

        A byte-fallback decoder shows a run of byte tokens as U+FFFD throughout while any of it is
        unfinished; then the tokens before the unfinished character are left behind.
        """
        text = self._decoded(self._window)
        if text.startswith(self._sent):
            return text
        self._restart(self._boundary)
        return self._decoded(self._window)

    def _unsent(self, text: str) -> str:
        if len(self._prompt) > len(self._sent) and text.startswith(self._prompt):
            self._sent = self._prompt  # its U+FFFD was no half of a character
        piece = text[len(self._sent) :]
        self._sent += piece
        return piece

    def _give_up(self) -> str:
        """The text of held tokens that cannot be completed, and of those that follow."""
        garbage = self._unsent(self._decoded(self._window[:-MAX_HELD]))
        self._restart(len(self._window) - MAX_HELD)
        text = self._decoded(self._window)
        self._sent = text.rstrip(REPLACEMENT)
        self._held = 0 if self._sent == text else MAX_HELD
        return garbage + self._sent

    def _trim(self) -> None:
        if len(self._window) > MAX_WINDOW:
            self._restart(self._boundary or len(self._window) - CONTEXT)
            self._sent = self._decoded(self._window).rstrip(REPLACEMENT)

    def _restart(self, start: int) -> None:
        """Forgets the window before ``start``."""
        del self._window[:start]
        self._boundary = 0
        self._prompt = self._sent = ""

    def _first_window(self, prompt_tail: list[int]) -> list[int]:
        """The last few tokens of the prompt, from where a character starts."""
        visible = [token_id for token_id in prompt_tail if self._is_visible(token_id)]
        for length in range(CONTEXT - MAX_HELD, CONTEXT):
            if not self._decoded(visible[-length:]).startswith(REPLACEMENT):
                return visible[-length:]
        return visible[-CONTEXT:]
