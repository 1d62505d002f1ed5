"""A completion as the client returns it: pieces as they come, or the whole."""

from typing import Any

import msgspec

from driver.request import Logprob, ReturnSample, Usage
from ipc.wire.messages import Done, Token

Message = dict[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "What is 3 + 4?"}``."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities by token id, for one position: first the actual token, then the likeliest."""


class Piece(msgspec.Struct, frozen=True):
    """The new part of a completion. The last piece of a sample has its ``finish_reason``.

    Only the last piece of all has the ``usage``. ``index`` is the sample's, of ``n``. ``logprobs``
    has an entry for each token, ``prompt_logprobs`` one for each prompt token, None for the first;
    both only on request. ``stop_reason`` is the stop string or the id of ``stop_token_ids`` that
    ended the sample. Its last piece has ``weight_versions``: the number of each version of the
    weights that made tokens of it, and the index of the first; none if it is 1 for all.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    usage: Usage | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, int]] = []


class Choice(msgspec.Struct, frozen=True):
    """One whole sample."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]
    stop_reason: int | str | None = None
    weight_versions: list[tuple[int, int]] = []
    """As in Piece."""


class Completion(msgspec.Struct, frozen=True):
    """A whole completion: its ``n`` samples, its usage, and the prompt's log-probabilities.

    ``text``, ``token_ids``, ``finish_reason`` and ``logprobs`` are those of the first sample.
    """

    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None]

    @property
    def text(self) -> str:
        """The first sample's."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sample's."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The first sample's."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The first sample's."""
        return self.choices[0].logprobs


_TOKEN_BYTES, _LOGPROB_BYTES = 40, 250
"""The approximate bytes of a token, and of an entry of its logprobs, in memory."""


def num_bytes(piece: Piece | ReturnSample) -> int:
    """The approximate bytes of a piece, or of the driver's sample, in memory; those of joined ones add up."""
    logprobs = [*piece.logprobs, *piece.prompt_logprobs] if piece.logprobs or piece.prompt_logprobs else ()
    entries = sum([len(token) for token in logprobs if token is not None])
    return len(piece.text) + _TOKEN_BYTES * len(piece.token_ids) + _LOGPROB_BYTES * entries


def piece_of(answer: Token | Done) -> Piece:
    """A daemon's message as the caller's piece."""
    return Piece(
        answer.text,
        answer.token_ids,
        answer.finish_reason,
        answer.usage if isinstance(answer, Done) else None,
        answer.index,
        answer.logprobs,
        answer.prompt_logprobs,
        answer.stop_reason,
        [] if answer.finish_reason is None else answer.weight_versions,
    )


def whole(pieces: list[Piece]) -> Completion:
    """All pieces of a completion as one."""
    usage = pieces[-1].usage
    assert usage is not None
    samples: dict[int, list[Piece]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append(piece)
    return Completion(
        choices=[_choice(index, samples[index]) for index in sorted(samples)],
        usage=usage,
        prompt_logprobs=[token for piece in pieces for token in piece.prompt_logprobs],
    )


def _choice(index: int, pieces: list[Piece]) -> Choice:
    reason = pieces[-1].finish_reason
    assert reason is not None
    return Choice(
        index=index,
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        finish_reason=reason,
        logprobs=[token for piece in pieces for token in piece.logprobs],
        stop_reason=pieces[-1].stop_reason,
        weight_versions=pieces[-1].weight_versions,
    )
