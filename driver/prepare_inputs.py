"""The first stage: turns requests into sequences for the engine, or refuses them."""

import math
import secrets
from collections.abc import Callable
from functools import partial
from queue import Full

import msgspec

from driver.errors import ContextLengthExceeded, DriverError, InvalidRequest, Overloaded
from driver.open_requests import OpenRequest, OpenRequests
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest, Usage, error_sample
from driver.request_parameters import sampling_params
from driver.resumption import read_again, resume
from driver.stages.queues import TurnQueue
from driver.stages.stage import Stage
from driver.text.detokenizer import PROMPT_TAIL
from driver.text.tokenizer import HuggingFaceTokenizer, answer_tokenizer, check_in_vocabulary, prompt_token_ids
from driver.thread_messages import Admit, Opened
from engine.request_limits import MAX_BAD_WORD_TOKENS, MAX_PROMPT_LOGPROBS, MAX_SEED, ServingLimits
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

LANES = ((2048, 2), (32_768, 1), (math.inf, 1))
"""Of each lane: the approximate limit of a prompt's tokens, and its number of threads.

Tokenising takes milliseconds in the first lane, tenths of seconds in the second, and many seconds
in the last, where a text has up to four megabytes. Other threads run meanwhile: the tokenizer
releases the interpreter's lock.
"""

PreparableRequest = OpenRequest | TokenizerRequest


class PrepareInputs:
    """Checks, tokenises and admits requests. Each of its threads calls one of ``runs``.

    Clients take turns (see TurnQueue), and long prompts have a lane and a thread of their own: so
    neither many requests of one client nor a text of megabytes delays the others. An exception
    from one request ends that request alone. ``post`` puts an Admit into the inbox of the
    execution thread, ``compile_grammar`` one with structured outputs into the compile stage.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        limits: ServingLimits,
        open_requests: OpenRequests,
        post: Callable[[Admit], None],
        max_queued: int,
        compile_grammar: Callable[[Admit], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = {name: value for name, value in limits.default_sampling_params.items() if name != "max_tokens"}
        self._open_requests = open_requests
        self._post = post
        self._compile_grammar = compile_grammar
        self._lanes: list[TurnQueue[PreparableRequest]] = [
            TurnQueue(max_queued, lambda item: item.holder) for _ in LANES
        ]
        self._tokenizer_requests: dict[str, TokenizerRequest] = {}
        """The tokenizer requests that are queued, by id."""
        self.stage: Stage[PreparableRequest] = Stage(
            "prepare inputs", self._handle, self._fail, lambda item: item.source
        )
        self.runs = [
            partial(lane.run, self.stage.work)
            for lane, (_, num_threads) in zip(self._lanes, LANES, strict=True)
            for _ in range(num_threads)
        ]
        """One for each thread: prepares requests until the queues are closed."""

    def submit(self, request: PreparableRequest) -> None:
        """Queues the request at once, from any thread; raises Overloaded or QueueClosed."""
        if isinstance(request, TokenizerRequest):
            self._tokenizer_requests[request.request_id] = request
        try:
            self._lane_of(request).put_nowait(request)
        except Full as full:
            self._tokenizer_requests.pop(request.request_id, None)
            raise Overloaded("too many requests wait to be prepared: try again later") from full

    def withdraw(self, request: OpenRequest) -> bool:
        """Ends an aborted request that no thread has taken from the queue; False if one has."""
        removed = self._lane_of(request).remove(request)
        if removed:
            self._open_requests.close(request, _aborted(request.request_id))
        return removed

    def withdraw_tokenizer_request(self, request_id: str) -> bool:
        """The same for a tokenizer request."""
        request = self._tokenizer_requests.pop(request_id, None)
        if request is None or not self._lane_of(request).remove(request):
            return False
        request.channel.put(_aborted(request_id))
        return True

    @property
    def num_queued(self) -> int:
        """Requests that wait to be prepared."""
        return sum(map(len, self._lanes))

    def close(self) -> None:
        """Ends all ``runs`` and drops what is queued."""
        for lane in self._lanes:
            lane.close()

    def _lane_of(self, request: PreparableRequest) -> "TurnQueue[PreparableRequest]":
        lanes = zip(self._lanes, LANES, strict=True)
        return next(lane for lane, (below, _) in lanes if request.num_prompt_tokens < below)

    def _handle(self, request: PreparableRequest) -> None:
        try:
            if isinstance(request, TokenizerRequest):
                if self._tokenizer_requests.get(request.request_id) is request:  # or it is another's of the same id
                    del self._tokenizer_requests[request.request_id]
                request.channel.put(answer_tokenizer(request, self._tokenizer, self._limits))
            else:
                self._prepare(request)
        except InvalidRequest as error:
            self._fail(request, error)

    def _fail(self, request: PreparableRequest, error: DriverError) -> None:
        if isinstance(request, OpenRequest):
            self._open_requests.fail(request, error)
        else:
            request.channel.put(error_sample(request.request_id, error))

    def _prepare(self, request: OpenRequest) -> None:
        if request.aborted:
            self._open_requests.close(request, _aborted(request.request_id))
            return
        params = sampling_params(request.request.params, self._defaults)
        sequences = self._sequences(request, params)
        outputs = resume(sequences, request.request.resume_token_ids)
        prompt = sequences[0].prompt_token_ids
        prompt_tail = prompt[-PROMPT_TAIL:]
        complete = {output.request_id for output in outputs if output.finish_reason is not None}
        resumed = read_again(outputs, params, prompt_tail, self._tokenizer, lambda: request.aborted)
        if resumed is None:
            self._open_requests.close(request, _aborted(request.request_id))
            return
        admit = Admit(
            [sequence for sequence in sequences if sequence.request_id not in complete],
            Opened(request, sequences, prompt_tail, len(prompt), params, resumed),
        )
        if params.structured_outputs is None or not admit.sequences:
            self._post(admit)
        else:
            self._compile_grammar(admit)

    def _sequences(self, request: OpenRequest, params: SamplingParams) -> list[Sequence]:
        """One for each sample; only the first returns the prompt's log-probabilities."""
        prompt_token_ids = self._prompt_token_ids(request.request, params)
        _check_prompt_logprobs(params.prompt_logprobs, len(prompt_token_ids))
        max_tokens = self._max_tokens(len(prompt_token_ids), params)
        ends = frozenset(params.stop_token_ids).union(self._limits.eos_token_ids)
        stop_token_ids = frozenset(params.stop_token_ids) if params.ignore_eos else ends
        bad_words = self._bad_word_token_ids(params.bad_words)
        self._check_token_ids(params, ends, bad_words)
        for index, token_ids in enumerate(request.request.resume_token_ids):
            self._check_in_vocabulary(f"resume_token_ids[{index}]", token_ids)
        further = params
        if params.prompt_logprobs is not None:
            further = msgspec.structs.replace(params, prompt_logprobs=None)
        is_resumed = any(request.request.resume_token_ids[:1])  # the client has them already
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        request.num_samples = params.n
        salt = self._salt(request, params)
        sequences = []
        for index in range(params.n):
            sequence = Sequence(
                request_id=request.sequence_ids[index],
                prompt_token_ids=prompt_token_ids,
                params=further if index or is_resumed else params,
                stop_token_ids=stop_token_ids,
                ignored_token_ids=ends - stop_token_ids,
                max_tokens=max_tokens,
                seed=(seed + index) % (MAX_SEED + 1),
                bad_word_token_ids=bad_words,
                client=request.request.client,
                user=request.request.user,
                salt=salt,
                adapter_id=0 if request.adapter is None else request.adapter.version,
            )
            sequences.append(sequence)
        self._hash_prompt(sequences)
        request.sequences = sequences
        return sequences

    def _hash_prompt(self, sequences: list[Sequence]) -> None:
        """Hashes the prompt's pages for the prefix cache, to spare the execution thread."""
        first, page_size = sequences[0], self._limits.page_size
        if page_size is not None and first.salt is not None:
            keys = first.page_keys_to(len(first.prompt_token_ids) // page_size, page_size)
            for sequence in sequences[1:]:
                sequence.page_keys = list(keys)

    def _salt(self, request: OpenRequest, params: SamplingParams) -> bytes | None:
        """The salt of its pages' keys, by tenant, salt and version of its adapter; None where it
        shares no pages."""
        if not params.enable_prefix_caching or self._limits.page_size is None:
            return None
        adapter = [] if request.adapter is None else [request.adapter.version]
        return msgspec.json.encode([request.request.tenant, params.cache_salt, *adapter])

    def _check_token_ids(
        self, params: SamplingParams, ends: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        self._check_in_vocabulary("stop_token_ids", params.stop_token_ids)
        most = self._limits.vocab_size - 1
        for token_id in params.logit_bias:
            if not 0 <= token_id <= most:
                raise InvalidRequest(f"logit_bias[{token_id}] must be for a token id from 0 to {most}")
        if params.allowed_token_ids is None:
            return
        self._check_in_vocabulary("allowed_token_ids", params.allowed_token_ids)
        banned = {word[0] for word in bad_words if len(word) == 1}
        hidden = ends if params.min_tokens else frozenset()
        if not set(params.allowed_token_ids) - banned - hidden:
            raise InvalidRequest(
                "allowed_token_ids must have a token that bad_words do not ban, and with min_tokens one that does not"
                " end the output: there is none"
            )

    def _bad_word_token_ids(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word at the start of a text, after a space, and right behind other text, but for those that
        end with others of these."""
        spellings: dict[tuple[int, ...], None] = {}
        line = self._tokenizer.encode_word("\n") if words else []
        for word in words:
            bare = word.lstrip()
            alone, spaced, at_line = (self._tokenizer.encode_word(space + bare) for space in ("", " ", "\n"))
            # Many tokenizers put a space in front of the first word of a text, and of no other line. Some make one
            # unknown token of a line's end and a word.
            behind = (at_line[len(line) :] if at_line[: len(line)] == line else []) or alone
            if not alone:
                raise InvalidRequest(f"bad_words must be words of at least one token, not {word!r}")
            if max(map(len, (alone, spaced, behind))) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"bad_words must be words of at most {MAX_BAD_WORD_TOKENS} tokens, not {word!r}")
            spellings |= dict.fromkeys(map(tuple, (alone, spaced, behind)))
        return tuple(ids for ids in spellings if not any(ids[place:] in spellings for place in range(1, len(ids))))

    def _prompt_token_ids(self, request: ActiveRequest, params: SamplingParams) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("a request has either a prompt or messages: give exactly one of them")
        most, kept = self._limits.max_model_len, params.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, most - (params.max_tokens or 1))
        token_ids = prompt_token_ids(request, self._tokenizer.encode, self._tokenizer, most, kept)
        if not token_ids or request.prompt == "":
            raise InvalidRequest("prompt is empty: it must have at least one token")
        self._check_in_vocabulary("prompt", token_ids)
        return token_ids

    def _check_in_vocabulary(self, name: str, token_ids: list[int]) -> None:
        check_in_vocabulary(name, token_ids, self._limits.vocab_size)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        most = self._limits.max_model_len
        room = most - num_prompt_tokens
        prompt = f"the prompt has {num_prompt_tokens} tokens"
        if room < 1:
            raise ContextLengthExceeded(most, prompt, "shorten it")
        for name, count in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
            if count is not None and count > room:
                remedy = f"ask for at most {room}, or shorten the prompt"
                raise ContextLengthExceeded(most, f"{prompt} and {name} is {count}", remedy)
        allowed = int(self._limits.default_sampling_params.get("max_tokens", room))
        if params.min_tokens > allowed:
            raise InvalidRequest(
                f"min_tokens must be at most {allowed}, this model's own limit, not {params.min_tokens}"
            )
        return min(room if params.max_tokens is None else params.max_tokens, allowed)


def _aborted(request_id: str) -> ReturnSample:
    """The last sample of a request that was aborted before it was prepared."""
    return ReturnSample(request_id=request_id, finish_reason="abort", usage=Usage(0, 0))


def _check_prompt_logprobs(count: int | None, num_prompt_tokens: int) -> None:
    if count is not None and num_prompt_tokens * (count + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs: {count + 1} for each of {num_prompt_tokens} tokens are more than {MAX_PROMPT_LOGPROBS}:"
            " ask for fewer, or shorten the prompt"
        )
