"""Resuming a completion that was interrupted: what has arrived of it, and the request for the
rest. A question to the tokenizer has none: it is asked again.

A draw depends on seed and position alone. So the same request, with the same seed and with the
known tokens as the beginning of its output, gets the tokens it would have got, up to rounding
(docs/reliability.md, "The same tokens again"). The arrived tokens are recorded here, message by message.
"""

import random
import secrets
from collections import defaultdict
from typing import Any

import msgspec

from engine.metrics.engine_stats import FIRST_VERSION
from engine.request_limits import MAX_SEED
from ipc.errors import ConnectionLost, OdriverError, RequestFailed
from ipc.wire.codec import decode_client_message
from ipc.wire.messages import ClientMessage, Detokenize, Done, Generate, Token, Tokenize, Welcome

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds before a retry: doubled each time without progress, of which a random part."""
NO_TIME = 1e-3
"""The timeout of a request without time left: the daemon ends it with reason "timeout"."""

RESTING = ("draining", "asleep")
"""Codes of a daemon that ends or pauses and takes nothing new; it or its successor will serve again."""
GOING = ("stopped", *RESTING)
"""The same, also for what was open."""
FULL = ("overloaded", "quota_exceeded")
"""Codes of a full daemon: the caller repeats a new request, we repeat an accepted one."""
NOT_LOADED = "not_found"
"""Code of a daemon that came back without the adapter of an accepted request: its operator may load it again, where it
serves adapters."""
MAX_LOSSES, MAX_FAULTS = 3, 2
"""How often in a row, without a new token between, a daemon goes away with the request, or ends it
by a fault of its own, until it is given up: it may be the request that does it, and does it to
others too."""


def with_seed(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters, with a seed that is drawn now if they have none."""
    return {**params, "seed": secrets.randbelow(MAX_SEED + 1)} if params.get("seed") is None else params


class Resumption:
    """One completion, from its first request on, or one question to the tokenizer. Times are in
    seconds, and the caller's. ``model`` is what the request names."""

    def __init__(self, frame: bytes, now: float, model: str) -> None:
        self.why: OdriverError | None = None
        """How it was lost the last time."""
        self._interrupted_at: float | None = None
        self._frame = frame
        """The request as it was sent; the caller may since change its objects."""
        self._began = now
        self._delay = FIRST_DELAY
        self._losses = self._faults = 0
        self._server: tuple[str, int] | None = None
        """Model and vocabulary of the daemon that it began with."""
        self._fingerprint = ""
        """Of the daemon that it was last sent to."""
        self._model = model
        self._adapter = ""
        """What that is the name of there, "" for the model itself, which may lose a name and is still the same."""
        self._enable_lora = False
        """Whether the daemon that it was last sent to serves adapters."""
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._versions: dict[int, list[tuple[int, int]]] = {}
        """By sample: the versions of the weights that made its tokens, as far as they are told."""
        self._ended: set[int] = set()
        self._num_prompt_logprobs = 0
        self._come_again = 0
        """Log-probabilities of the prompt that are known and will come again."""

    @property
    def fingerprint(self) -> str | None:
        """That of the daemons that can go on with it; None before anything of the answer has come: any may begin."""
        has_begun = any(self._token_ids.values()) or self._ended or self._num_prompt_logprobs
        return self._fingerprint if has_begun else None

    @property
    def is_suspect(self) -> bool:
        """Whether it is given up with the next daemon that goes away."""
        return self._losses + 1 >= MAX_LOSSES

    @property
    def weight_version(self) -> int | None:
        """That of the weights that made its last tokens; None before there are any."""
        if not any(self._token_ids.values()):
            return None
        return max((pairs[-1][0] for pairs in self._versions.values() if pairs), default=FIRST_VERSION)

    def take(self, answer: Token | Done) -> Token | Done | None:
        """The new part of a message; None if nothing is new, as in the repeated end of a
        sample."""
        index = answer.index
        if index in self._ended and isinstance(answer, Token):
            return None
        self._interrupted_at, self._delay = None, FIRST_DELAY
        if answer.token_ids:
            self._losses = self._faults = 0
        self._token_ids[index] += answer.token_ids
        self._versions[index] = versions = _joined(self._versions.get(index, []), answer.weight_versions)
        if answer.finish_reason is not None:
            self._ended.add(index)
            answer = msgspec.structs.replace(answer, weight_versions=_whole(versions))
        known = min(self._come_again, len(answer.prompt_logprobs))
        if known:
            self._come_again -= known
            answer = msgspec.structs.replace(answer, prompt_logprobs=answer.prompt_logprobs[known:])
        self._num_prompt_logprobs += len(answer.prompt_logprobs)
        return answer

    def is_turned_away(self, error: OdriverError) -> bool:
        """Whether a daemon that takes nothing new has refused it as a new request."""
        resting = isinstance(error, RequestFailed) and error.code in RESTING
        return resting and self._interrupted_at is None

    def outlasts(self, error: OdriverError) -> bool:
        """Whether to retry after this error: it is no answer yet, nor caused by the request."""
        if not isinstance(error, RequestFailed):
            return not self.is_suspect
        if error.code in FULL:
            return self._interrupted_at is not None
        if error.code == NOT_LOADED:
            return self._interrupted_at is not None and self._enable_lora
        return error.code in GOING or (error.code == "internal" and self._faults + 1 < MAX_FAULTS)

    def verdict(self, error: OdriverError) -> OdriverError:
        """The final error for the caller, with the reason why there is no retry."""
        if not self.is_suspect or isinstance(error, RequestFailed):
            return error
        return ConnectionLost(
            f"{error}; {MAX_LOSSES} daemons in a row went away with this request, with no new token between: it is given"
            " up, as it may be the cause"
        )

    def interrupt(self, why: OdriverError, now: float) -> float:
        """The call was lost; returns the time since when nothing new can come."""
        self.why = why
        self._losses += not isinstance(why, RequestFailed)
        self._faults += isinstance(why, RequestFailed) and why.code == "internal"
        if self._interrupted_at is None:
            self._interrupted_at = now
        return self._interrupted_at

    def delay(self) -> float:
        """Seconds before the next attempt at a reachable daemon, at least its retry_after_s."""
        longest, self._delay = self._delay, min(2 * self._delay, LONGEST_DELAY)
        hint = self.why.retry_after_s if isinstance(self.why, RequestFailed) else None
        return (hint or 0.0) + longest * random.uniform(0.5, 1)

    def rest(self, now: float, request_id: str) -> ClientMessage:
        """The request for the part that has not arrived."""
        request = decode_client_message(self._frame)
        if isinstance(request, Generate | Tokenize | Detokenize):
            request = msgspec.structs.replace(request, request_id=request_id, model=self._adapter)
        if not isinstance(request, Generate):
            return request
        params, token_ids = request.params, []
        if self._token_ids:
            token_ids = [self._token_ids[index] for index in range(params.get("n", 1))]
        self._come_again = 0 if any(token_ids[:1]) else self._num_prompt_logprobs
        if self._token_ids:
            params.pop("queue_timeout_s", None)  # which was until its first step
        for name in ("timeout_s", "queue_timeout_s"):
            if isinstance(params.get(name), int | float):
                params[name] = max(NO_TIME, params[name] - (now - self._began))
        return msgspec.structs.replace(request, params=params, resume_token_ids=token_ids)

    def mismatch(self, welcome: Welcome) -> str | None:
        """Why this daemon cannot continue a request begun at another; None if it can."""
        server = welcome.model, welcome.vocab_size
        if self._server is not None and self._server != server:
            model, vocab_size = self._server
            return (
                f"the daemon now serves {welcome.model} ({welcome.vocab_size} tokens), and not {model} ({vocab_size}) any"
                " more: what that began cannot be gone on with"
            )
        if self.fingerprint not in (None, welcome.fingerprint):
            return (
                f"the daemon now serves {welcome.model} by other weights, dtypes, tokenizer or seed (fingerprint "
                f"{welcome.fingerprint or 'unknown'}, and not {self._fingerprint or 'unknown'} any more): what those began "
                "cannot be gone on with"
            )
        if self._server is None:
            self._adapter = welcome.adapter_of(self._model)
        elif self._token_ids and self._adapter in welcome.models:
            return (
                f"{self._adapter!r} was an adapter, and is the model itself now: what it began cannot be gone on with"
            )
        self._server, self._enable_lora, self._fingerprint = server, welcome.enable_lora, welcome.fingerprint
        return None


def _joined(known: list[tuple[int, int]], new: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The versions of a sample: those known, up to where the new ones begin."""
    return [pair for pair in known if not new or pair[1] < new[0][1]] + new


def _whole(versions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of a whole sample, where what nobody told of is of the first version."""
    if versions and versions[0][1] > 0:
        versions = [(FIRST_VERSION, 0), *versions]
    changes = [pair for number, pair in enumerate(versions) if not number or pair[0] != versions[number - 1][0]]
    return [] if changes == [(FIRST_VERSION, 0)] else changes
