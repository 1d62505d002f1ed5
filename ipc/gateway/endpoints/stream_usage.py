"""The usage in a stream's chunks."""

from msgspec import UNSET, UnsetType

from ipc.openai.answer_bodies import CompletionUsage
from ipc.wire.completion import Piece


class StreamUsage:
    """That of all chunks but the last: what was used so far, if the prompt's tokens are given;
    otherwise null where the last has it (``included``), or none."""

    def __init__(self, num_prompt_tokens: int | None, *, included: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._included = included
        self._num_tokens = 0

    def take(self, piece: Piece) -> None:
        """Count one more piece."""
        self._num_tokens += len(piece.token_ids)

    def shown(self) -> CompletionUsage | UnsetType | None:
        """As of now."""
        if self._num_prompt_tokens is not None:
            total = self._num_prompt_tokens + self._num_tokens
            return CompletionUsage(self._num_prompt_tokens, self._num_tokens, total)
        return None if self._included else UNSET
