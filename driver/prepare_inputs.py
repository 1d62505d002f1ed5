"""The first stage: from what a client asked to a Sequence that the engine can serve, or to a refusal that says why."""

import difflib
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from driver.bounded_queue import BoundedQueue, QueueClosed
from driver.detokenizer import PROMPT_TAIL
from driver.errors import InvalidRequest, Overloaded
from driver.load_limit import estimated_tokens
from driver.messages import Admit, Opened
from driver.open_requests import OpenRequest, OpenRequests
from driver.request import ActiveRequest, RequestError, ReturnSample, TokenizerRequest, Usage
from driver.resumption import take_up
from driver.stop_regex import StopRegex
from driver.tokenization import answer_tokenizer, chat_token_ids, check_in_vocabulary
from driver.tokenizer import Tokenizer
from engine.config import ServingLimits
from engine.sampling_params import MAX_BAD_WORD_TOKENS, MAX_SEED, SamplingParams
from engine.sequence import Sequence


class PrepareInputs:
    """Checks, tokenises and admits, one request at a time. Its thread is the only one that encodes or draws seeds.

    A client's mistake ends that client's request alone. ``post`` puts an Admit where the execution thread finds it,
    ``compile_grammar`` one that asks for structured outputs where that is done first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ServingLimits,
        open_requests: OpenRequests,
        post: Callable[[Admit], None],
        max_queued: int,
        compile_grammar: Callable[[Admit], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._open_requests = open_requests
        self._post = post
        self._compile_grammar = compile_grammar
        self._queue: BoundedQueue[OpenRequest | TokenizerRequest] = BoundedQueue(max_queued, _weight)
        self._seeds = np.random.default_rng()

    def submit(self, request: OpenRequest | TokenizerRequest) -> None:
        """Queues the request, from any thread; raises Overloaded when full, QueueClosed when closed, at once."""
        try:
            self._queue.put_nowait(request)
        except queue.Full as full:
            raise Overloaded("too many requests wait to be prepared: try again later") from full

    @property
    def num_queued(self) -> int:
        """Requests that wait to be prepared."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of their prompts, about."""
        return self._queue.weight

    def close(self) -> None:
        """Ends ``run``; what is queued is dropped."""
        self._queue.close()

    def run(self) -> None:
        """Prepares requests until the queue is closed."""
        with suppress(QueueClosed):
            while True:
                request = self._queue.get()
                if isinstance(request, TokenizerRequest):
                    self._answer(request)
                else:
                    self._prepare(request)

    def _answer(self, request: TokenizerRequest) -> None:
        try:
            sample = answer_tokenizer(request, self._tokenizer, self._limits.vocab_size)
        except InvalidRequest as error:
            refusal = RequestError(error.code, str(error))
            sample = ReturnSample(request_id=request.request_id, error=refusal)
        request.channel.put(sample)

    def _prepare(self, request: OpenRequest) -> None:
        if request.aborted:
            unread = ReturnSample(request_id=request.request_id, finish_reason="abort", usage=Usage(0, 0))
            self._open_requests.close(request, unread)
            return
        try:
            params = sampling_params(request.request.params)
            stop_regexes = [_stop_regex(pattern) for pattern in params.stop_regexes]
            sequences = self._sequences(request, params)
            resumed = take_up(sequences, request.request.resume_token_ids)
        except InvalidRequest as error:
            self._open_requests.fail(request, error)
            return
        prompt = sequences[0].prompt_token_ids
        whole = {output.request_id for output in resumed if output.finish_reason is not None}
        admit = Admit(
            [sequence for sequence in sequences if sequence.request_id not in whole],
            Opened(request, sequences, prompt[-PROMPT_TAIL:], len(prompt), params, stop_regexes, resumed),
        )
        if params.structured_outputs is None or not admit.sequences:
            self._post(admit)
        else:
            self._compile_grammar(admit)

    def _sequences(self, request: OpenRequest, params: SamplingParams) -> list[Sequence]:
        """One for each sample, alike but for the seed; the first alone looks at the prompt's log-probabilities."""
        prompt_token_ids = self._prompt_token_ids(request.request)
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else self._limits.eos_token_ids)
        bad_words = self._bad_word_token_ids(params.bad_words)
        self._check_token_ids(params, stop_token_ids, bad_words)
        for index, token_ids in enumerate(request.request.resume_token_ids):
            self._check_in_vocabulary(f"resume_token_ids[{index}]", token_ids)
        if any(request.request.resume_token_ids[:1]):  # they came with the first token, or before
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        seed = int(self._seeds.integers(MAX_SEED, endpoint=True)) if params.seed is None else params.seed
        request.num_samples = params.n
        salt = self._salt(request, params)
        sequences = []
        for index in range(params.n):
            sequence = Sequence(
                request_id=request.sequence_ids[index],
                prompt_token_ids=prompt_token_ids,
                params=params,
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
                seed=(seed + index) % (MAX_SEED + 1),
                bad_word_token_ids=bad_words,
                client=request.request.client,
                salt=salt,
            )
            sequences.append(sequence)
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        self._hash_prompt(sequences)
        return sequences

    def _hash_prompt(self, sequences: list[Sequence]) -> None:
        """Here, and not on the execution thread, where others wait for each of the thousands of pages of a long one."""
        first, page_size = sequences[0], self._limits.page_size
        if page_size is not None and first.salt is not None:
            keys = first.page_keys_to(len(first.prompt_token_ids) // page_size, page_size)
            for sequence in sequences[1:]:
                sequence.page_keys = list(keys)

    def _salt(self, request: OpenRequest, params: SamplingParams) -> bytes | None:
        """What separates its pages from others': its tenant and its salt; None where it shares none."""
        if not params.enable_prefix_caching or self._limits.page_size is None:
            return None
        return msgspec.json.encode([request.request.tenant, params.cache_salt])

    def _check_token_ids(
        self, params: SamplingParams, stop_token_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        self._check_in_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_in_vocabulary("logit_bias", list(params.logit_bias))
        if params.allowed_token_ids is None:
            return
        self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids)
        banned = {word[0] for word in bad_words if len(word) == 1}
        hidden = stop_token_ids if params.min_tokens else frozenset()
        if not set(params.allowed_token_ids) - banned - hidden:
            raise InvalidRequest(
                "allowed_token_ids must have a token that bad_words do not ban, and with min_tokens one that does not"
                " end the output: there is none"
            )

    def _bad_word_token_ids(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the beginning of a text, and, where they differ, of the word after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = tuple(self._tokenizer.encode_word(word.lstrip()))
            spaced = tuple(self._tokenizer.encode_word(" " + word.lstrip()))
            if not bare:
                raise InvalidRequest(f"bad_words must be words of at least one token, not {word!r}")
            if max(len(bare), len(spaced)) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"bad_words must be words of at most {MAX_BAD_WORD_TOKENS} tokens, not {word!r}")
            found[bare] = None
            if spaced[1:] != bare:
                found[spaced] = None
        return tuple(found)

    def _prompt_token_ids(self, request: ActiveRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("a request has either a prompt or messages: give exactly one of them")
        if request.messages is None and (request.tools or request.chat_template_kwargs):
            raise InvalidRequest("tools and chat_template_kwargs are for the chat template: send messages")
        if request.messages is not None:
            token_ids = chat_token_ids(request, self._tokenizer)
        elif isinstance(request.prompt, str):
            token_ids = self._tokenizer.encode(request.prompt) if request.prompt else []
        elif isinstance(request.prompt, list):
            token_ids = list(request.prompt)
        else:
            raise InvalidRequest(f"prompt must be a string or a list of token ids, not {type(request.prompt).__name__}")
        if not token_ids:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        self._check_in_vocabulary("prompt", token_ids)
        return token_ids

    def _check_in_vocabulary(self, name: str, token_ids: list[int]) -> None:
        check_in_vocabulary(name, token_ids, self._limits.vocab_size)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = self._limits.max_model_len - num_prompt_tokens
        holds = f"a request may hold {self._limits.max_model_len} tokens here, prompt and output together"
        if room < 1:
            raise InvalidRequest(f"the prompt has {num_prompt_tokens} tokens, but {holds}: shorten it")
        for name, asked in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
            if asked is not None and asked > room:
                raise InvalidRequest(
                    f"{name} is {asked} and the prompt has {num_prompt_tokens} tokens, but {holds}:"
                    f" ask for at most {room}, or shorten the prompt"
                )
        return room if params.max_tokens is None else params.max_tokens


def _weight(queued: OpenRequest | TokenizerRequest) -> int:
    """In tokens, about; what generates none is for nobody to wait behind."""
    return 0 if isinstance(queued, TokenizerRequest) else estimated_tokens(queued.request)


def sampling_params(params: dict[str, Any]) -> SamplingParams:
    """The checked parameters; raises InvalidRequest naming the one that is unknown, of a wrong type or out of range."""
    names = SamplingParams.__struct_fields__
    for name in params:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise InvalidRequest(f"unknown parameter {name!r}: {hint}")
    try:
        return msgspec.convert(params, SamplingParams, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_in_plain_words(str(error))) from error


def _in_plain_words(message: str) -> str:
    """``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected int, got str``."""
    what, _, path = message.partition(" - at `")
    name = path.rstrip("`").replace("$.", "")
    if not path or what.startswith(name):  # one of our own, which names what it is about
        return what
    return f"{name}: {what[0].lower()}{what[1:]}".replace("`", "").replace("array", "list")


def _stop_regex(pattern: str) -> StopRegex:
    try:
        return StopRegex(pattern)
    except ValueError as error:
        raise InvalidRequest(f"stop_regex: {error}") from error
