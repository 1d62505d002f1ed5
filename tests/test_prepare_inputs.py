"""From what a client asked to a Sequence, or to a refusal that says why."""

import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_driver import PATIENCE
from fakes import EOS, VOCAB_SIZE, FakeTokenizer
from tokenizer_files import build_byte_fallback, build_byte_level, write_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import Unigram

import driver.resumption
from caching.prefix_cache import page_keys
from driver.errors import Overloaded
from driver.open_requests import OpenRequest, OpenRequests
from driver.prepare_inputs import PrepareInputs
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest
from driver.stages.safe_thread import SafeThread
from driver.text.tokenizer import HuggingFaceTokenizer
from driver.thread_messages import Admit
from engine.request_limits import MAX_PROMPT_LOGPROBS, MAX_SEED, ServingLimits
from engine.scheduling.sequence import Sequence

LIMITS = ServingLimits(max_model_len=32, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), page_size=4)


class Stage:
    """A running PrepareInputs; Admits and samples both end up in ``outcomes``."""

    def __init__(
        self,
        *,
        max_queued: int = 8,
        started: bool = True,
        tokenizer: FakeTokenizer | HuggingFaceTokenizer | None = None,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.outcomes: queue.SimpleQueue[Admit | ReturnSample] = queue.SimpleQueue()
        self.to_compile: queue.SimpleQueue[Admit] = queue.SimpleQueue()
        self.open_requests = OpenRequests(lambda *_: None, lambda _: None)
        self.stage = PrepareInputs(
            tokenizer or FakeTokenizer(),
            msgspec.structs.replace(LIMITS, default_sampling_params=defaults or {}),
            self.open_requests,
            self.outcomes.put,
            max_queued,
            self.to_compile.put,
        )
        self.threads = [SafeThread("prepare", run, on_death=lambda *_: None) for run in self.stage.runs]
        if started:
            self.start()

    def start(self) -> None:
        """Starts its threads."""
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Ends its threads, of which none has died."""
        self.stage.close()
        assert all(thread.join(timeout=PATIENCE) and thread.error is None for thread in self.threads)

    def submit(self, request_id: str = "a", **fields: Any) -> OpenRequest:
        """Queues a request."""
        request = self.open_requests.add(ActiveRequest(request_id=request_id, channel=self.outcomes, **fields))
        self.stage.submit(request)
        return request

    def sequence(self, **fields: Any) -> Sequence:
        """The sequence that a good request becomes."""
        self.submit(**fields)
        outcome = self.outcomes.get(timeout=PATIENCE)
        assert isinstance(outcome, Admit)
        return outcome.sequences[0]

    def refusal(self, **fields: Any) -> str:
        """The message that a bad request is refused with."""
        self.submit(**fields)
        outcome = self.outcomes.get(timeout=PATIENCE)
        assert isinstance(outcome, ReturnSample) and outcome.error is not None
        is_long = outcome.error.message.startswith("this model's maximum context length is")
        assert outcome.error.code == ("context_length_exceeded" if is_long else "invalid_request")
        assert len(self.open_requests) == 0
        return outcome.error.message


class AbortingTokenizer(FakeTokenizer):
    """Sets the flag of an aborted request once it decodes, and counts."""

    def __init__(self) -> None:
        self.request: OpenRequest | None = None
        self.num_decoded = 0

    def decode(self, token_ids: ListOf[int], *, skip_special_tokens: bool = True) -> str:
        if self.request is not None:
            self.request.aborted = True
            self.num_decoded += 1
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


class HoldingTokenizer(FakeTokenizer):
    """Texts that begin with "hold" it encodes when it is let; of how long they are it says nothing before."""

    def __init__(self) -> None:
        self.held: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.let_go = threading.Semaphore(0)

    def least_tokens(self, text: str) -> int:
        del text
        return 0

    def encode(self, text: str) -> list[int]:
        if text.startswith("hold"):
            self.held.put(text)
            assert self.let_go.acquire(timeout=PATIENCE)
        if text == "break":
            raise RuntimeError("cannot encode")
        return super().encode(text)[:9]


@pytest.fixture
def holding() -> Iterator[tuple[Stage, HoldingTokenizer]]:
    """A stage whose tokenizer holds texts, not started; all are let go at the end."""
    tokenizer = HoldingTokenizer()
    stage = Stage(started=False, tokenizer=tokenizer)
    yield stage, tokenizer
    tokenizer.let_go.release(100)
    stage.stop()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A stage that is stopped after the test."""
    running = Stage()
    yield running
    running.stop()


def test_an_abort_ends_the_reading_of_a_resumed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of it: nobody waits until half a million tokens have been read."""
    monkeypatch.setattr(driver.resumption, "READ_AT_ONCE", 4)
    tokenizer = AbortingTokenizer()
    stage = Stage(tokenizer=tokenizer, started=False)
    tokenizer.request = stage.submit(prompt="a", resume_token_ids=[[98] * 24])

    stage.start()
    outcome = stage.outcomes.get(timeout=PATIENCE)
    stage.stop()

    assert isinstance(outcome, ReturnSample) and outcome.finish_reason == "abort" and outcome.is_last
    assert 0 < tokenizer.num_decoded < 24


def test_what_a_request_leaves_out_is_the_models_own() -> None:
    """Its temperature and the rest hold unless the request says otherwise; its max_tokens are a limit of all."""
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 9}
    stage = Stage(defaults=own)
    try:
        silent = stage.sequence(prompt="hi").params
        said = stage.sequence(request_id="b", prompt="hi", params={"temperature": 1, "top_k": 0, "max_tokens": 5})
        more = stage.sequence(request_id="c", prompt="hi", params={"max_tokens": 20})
        near_the_end = stage.sequence(request_id="d", prompt="x" * 28)
    finally:
        stage.stop()
    stage = Stage(defaults=own)
    try:
        refusal = stage.refusal(prompt="hi", params={"min_tokens": 10})
    finally:
        stage.stop()

    assert {name: getattr(silent, name) for name in own} == {**own, "max_tokens": None}
    assert (said.params.temperature, said.params.top_p, said.params.top_k) == (1.0, 0.9, 0)
    assert (said.max_tokens, more.max_tokens, near_the_end.max_tokens) == (5, 9, 4)
    assert "at most 9" in refusal


def test_text_becomes_a_sequence(stage: Stage) -> None:
    """Text is tokenised, parameters are checked, EOS ends the sequence, and its id is its own."""
    request = stage.submit(prompt="héy", params={"max_tokens": 3, "temperature": 0, "seed": 7, "stop": "END"})

    admit = stage.outcomes.get(timeout=PATIENCE)

    assert isinstance(admit, Admit)
    assert admit.sequences[0].prompt_token_ids == list("héy".encode())
    assert (admit.sequences[0].max_tokens, admit.sequences[0].seed, admit.sequences[0].params.temperature) == (3, 7, 0)
    assert admit.sequences[0].stop_token_ids == {EOS}
    assert admit.sequences[0].request_id == request.sequence_id
    assert admit.opened.request is request
    assert (admit.opened.num_prompt_tokens, admit.opened.params.stops) == (4, ["END"])


def test_token_ids_are_taken_as_they_are(stage: Stage) -> None:
    """A list of ids is the prompt, up to the last id of the vocabulary; the client's list is left alone."""
    prompt = [0, 5, VOCAB_SIZE - 1]

    sequence = stage.sequence(prompt=prompt)

    assert sequence.prompt_token_ids == prompt and sequence.prompt_token_ids is not prompt


def test_messages_go_through_the_chat_template(stage: Stage) -> None:
    """Messages become the prompt that the chat template makes of them."""
    sequence = stage.sequence(messages=[{"role": "user", "content": "?"}])

    assert FakeTokenizer().decode(sequence.prompt_token_ids) == "user: ?\nassistant: "


def test_stop_token_ids_join_the_eos_ids(stage: Stage) -> None:
    """A request's own stop tokens end it as EOS does; ignore_eos leaves only its own."""
    both = stage.sequence(request_id="a", prompt="x", params={"stop_token_ids": [10]})
    own = stage.sequence(request_id="b", prompt="x", params={"stop_token_ids": [10], "ignore_eos": True})

    assert both.stop_token_ids == {10, EOS}
    assert own.stop_token_ids == {10}
    assert (both.ignored_token_ids, own.ignored_token_ids) == (set(), {EOS})


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "resolved"), [(31, None, 1), (31, 1, 1), (4, None, 28), (4, 28, 28)]
)
def test_max_tokens_fills_the_context_and_no_more(
    stage: Stage, num_prompt: int, max_tokens: int | None, resolved: int
) -> None:
    """Prompt and output together may reach max_model_len exactly; None means all that is left."""
    sequence = stage.sequence(prompt="x" * num_prompt, params={"max_tokens": max_tokens})

    assert sequence.max_tokens == resolved


def test_a_seed_is_drawn_for_who_gives_none(stage: Stage) -> None:
    """Requests without a seed get different ones in the allowed range."""
    seeds = [stage.sequence(request_id=name, prompt="x").seed for name in "abcd"]

    assert len(set(seeds)) == 4 and all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize("build", [build_byte_level, build_byte_fallback])
def test_bad_words_are_banned_in_every_spelling(tmp_path: Path, build: Callable[[], Tokenizer]) -> None:
    """At the start of a text, after a space or a line's end, in quotation marks and within a word."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "t", build()))
    stage = Stage(tokenizer=tokenizer)

    banned = stage.sequence(prompt=[1], params={"bad_words": ["fox", " the", "on the"]}).bad_word_token_ids
    stage.stop()

    for text in ("fox", "a fox", "a\nfox", "'fox'", "oxfoxes", "the", "a the", ".\nthe", "bathe"):
        ids = tokenizer.encode_word(text)
        assert any(tuple(ids[place : place + len(word)]) == word for word in banned for place in range(len(ids))), text
    assert not any(tuple(tokenizer.encode_word(text)) in banned for text in ("ox", "he", "on", " "))
    assert not any(word[place:] in banned for word in banned for place in range(1, len(word)))


def test_a_bad_word_that_is_unknown_behind_a_line_is_banned_as_it_is_alone(tmp_path: Path) -> None:
    """With the line's end it is one unknown token: there is no spelling of no tokens, which the sampler could not ban."""
    pieces = Unigram([("<unk>", 0.0), ("<|end|>", 0.0), ("▁", -2.0), ("a", -1.0)], 0, byte_fallback=False)
    stage = Stage(tokenizer=HuggingFaceTokenizer(write_tokenizer(tmp_path / "t", Tokenizer(pieces))))

    banned = stage.sequence(prompt=[1], params={"bad_words": ["日"]}).bad_word_token_ids
    stage.stop()

    assert banned == ((0,),)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({}, "exactly one"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "exactly one"),
        ({"messages": []}, "at least one message"),
        ({"prompt": 5}, "prompt must be a string or a list of token ids, not int"),
        (
            {"prompt": "x" * 32},
            "length is 32 tokens, prompt and output together, but the prompt has 32 tokens: shorten it",
        ),
        (
            {"prompt": "x" * 99},
            "length is 32 tokens, prompt and output together, but the prompt has at least 99 tokens",
        ),
        ({"prompt": [1] * 33}, "the prompt has 33 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "the prompt has at least 117 tokens"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt[1] must be a token id from 0 to 256, not 257"),
        ({"prompt": [-1]}, "prompt[0] must be a token id from 0 to 256, not -1"),
        ({"prompt": [True]}, "prompt[0] must be a token id from 0 to 256, not True"),
        ({"prompt": [1.0]}, "prompt[0] must be a token id from 0 to 256, not 1.0"),
    ],
)
def test_a_bad_prompt_is_refused(stage: Stage, fields: dict[str, Any], complaint: str) -> None:
    """A prompt that cannot be served is refused with the numbers, and the next request is served."""
    assert complaint in stage.refusal(**fields)
    assert stage.sequence(prompt="x").prompt_token_ids == [120]


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"max_token": 3}, "unknown parameter 'max_token': did you mean 'max_tokens'?"),
        ({"grammar": "x"}, "unknown parameter 'grammar': there are n, max_tokens"),
        ({"logit_biases": {}}, "unknown parameter 'logit_biases': did you mean 'logit_bias'?"),
        ({3: 4}, "unknown parameter 3"),
        ({"stop_regex": "a"}, "unknown parameter 'stop_regex'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, "max_tokens must be at least 1, not -5"),
        ({"max_tokens": "3"}, "max_tokens: expected int | null, got str"),
        ({"max_tokens": 29}, "ask for at most 28"),
        ({"temperature": float("nan")}, "temperature must be from 0 to 100, not nan"),
        ({"temperature": True}, "temperature: expected float, got bool"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": 2**32}, "seed must be from 0 to 4294967295, not 4294967296"),
        ({"stop": 3}, "stop: expected str | list, got int"),
        ({"stop": ["a", 3]}, "stop[1]: expected str, got int"),
        ({"stop": ""}, "stop must be strings of 1 to"),
        ({"stop_token_ids": [257]}, "stop_token_ids[0] must be a token id from 0 to 256, not 257"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids must be at most 128 ids, not 129"),
        ({"n": 0}, "n must be from 1 to 64, not 0"),
        ({"n": 65}, "n must be from 1 to 64, not 65"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, not -1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be at most max_tokens (2), not 3"),
        ({"min_tokens": 29}, "the prompt has 4 tokens and min_tokens is 29: ask for at most 28"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2, not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be from -2 to 2, not -2.1"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty must be from 0.01 to 10, not 5e-324"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be from 0.01 to 10, not inf"),
        ({"logit_bias": {5: 101}}, "logit_bias[5] must be from -100 to 100, not 101"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias[5] must be from -100 to 100, not nan"),
        ({"logit_bias": {257: 1}}, "logit_bias[257] must be for a token id from 0 to 256"),
        ({"logit_bias": {"five": 1}}, "key in logit_bias: expected int, got str"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one token id, not []"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0] must be a token id from 0 to 256, not -1"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids must have a token that"),
        ({"allowed_token_ids": [120], "bad_words": ["x"]}, "allowed_token_ids must have a token that bad_words do not"),
        ({"bad_words": [""]}, "bad_words must be strings of 1 to 256 characters, not ''"),
        ({"bad_words": [" "]}, "bad_words must be words of at least one token, not ' '"),
        ({"bad_words": ["x" * 17]}, "bad_words must be words of at most 16 tokens"),
        ({"bad_words": ["x"] * 129}, "bad_words must be at most 128 strings, not 129"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be from 0 to 32, not -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 20, not -1"),
        ({"timeout_s": 0}, "timeout_s must be above 0 and at most 86400 seconds, not 0"),
        ({"stop": "a", "detokenize": False}, "stop must be left out where detokenize is false"),
        ({"repetition_detection": {"max_pattern_size": 0}}, "repetition_detection.max_pattern_size must be from 1 to"),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}},
            "repetition_detection.min_pattern_size must be from 1 to max_pattern_size (2), not 3",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
            "repetition_detection.min_count must be from 2 to 1000, not 1",
        ),
    ],
)
def test_a_bad_parameter_is_refused_by_name(stage: Stage, params: dict[str, Any], complaint: str) -> None:
    """A parameter that is unknown, of a wrong type or out of range is refused by its name, never ignored."""
    assert complaint in stage.refusal(prompt="xxxx", params=params)


def test_a_full_queue_sheds_load_at_once() -> None:
    """When max_queued requests wait, the next is refused on its own thread."""
    stage = Stage(max_queued=2, started=False)
    stage.submit("a", prompt="x")
    stage.submit("b", prompt="x")

    with pytest.raises(Overloaded):
        stage.submit("c", prompt="x")

    assert stage.stage.num_queued == 2


def test_a_request_aborted_in_the_queue_is_not_prepared() -> None:
    """A request aborted before its turn ends with reason abort and no tokens read."""
    stage = Stage(started=False)
    stage.submit(prompt="x").aborted = True

    stage.start()
    sample = stage.outcomes.get(timeout=PATIENCE)
    stage.stop()

    assert isinstance(sample, ReturnSample) and sample.finish_reason == "abort"
    assert len(stage.open_requests) == 0


def admitted(stage: Stage, count: int) -> list[str]:
    """The ids of the next requests to be admitted."""
    outcomes = [stage.outcomes.get(timeout=PATIENCE) for _ in range(count)]
    assert all(isinstance(outcome, Admit) for outcome in outcomes)
    return [outcome.opened.request.request_id for outcome in outcomes if isinstance(outcome, Admit)]


def test_a_giant_prompt_holds_up_nobody(holding: tuple[Stage, HoldingTokenizer]) -> None:
    """While texts of megabytes are encoded, shorter ones of the same client and of others go by; those likewise."""
    stage, tokenizer = holding
    stage.start()
    for name in ("a", "b"):
        stage.submit(f"giant {name}", prompt="hold" * 40_000, client=name)
    tokenizer.held.get(timeout=PATIENCE)
    stage.submit("long c", prompt="x" * 10_000, client="c")

    assert admitted(stage, 1) == ["long c"]
    stage.submit("long a", prompt="hold" * 3000, client="a")
    tokenizer.held.get(timeout=PATIENCE)
    stage.submit("short a", prompt="x", client="a")
    stage.submit("short d", prompt="x", client="d")
    assert set(admitted(stage, 2)) == {"short a", "short d"}
    tokenizer.let_go.release(3)
    assert set(admitted(stage, 3)) == {"giant a", "giant b", "long a"}


def test_many_requests_of_a_client_hold_up_no_other(holding: tuple[Stage, HoldingTokenizer]) -> None:
    """They take turns, and of one client one is prepared at a time, in the order of arrival."""
    stage, tokenizer = holding
    for number in range(4):
        stage.submit(f"a{number}", prompt=f"hold {number}", client="a")
    stage.submit("b0", prompt="x", client="b")
    stage.start()

    assert admitted(stage, 1) == ["b0"]
    tokenizer.let_go.release(4)
    assert admitted(stage, 4) == ["a0", "a1", "a2", "a3"]


def test_an_abort_in_the_queue_is_honoured_at_once(holding: tuple[Stage, HoldingTokenizer]) -> None:
    """Without a thread to come by: of a request, and of what asks the tokenizer; not of what is in a thread's hands."""
    stage, tokenizer = holding
    held = stage.submit("held", prompt="hold", client="a")
    stage.start()
    tokenizer.held.get(timeout=PATIENCE)
    queued = stage.submit("queued", prompt="hold", client="a")
    asked = TokenizerRequest(request_id="asked", channel=stage.outcomes, prompt="hold", client="a")
    stage.stage.submit(asked)

    withdrawn = [stage.stage.withdraw(queued), stage.stage.withdraw_tokenizer_request("asked")]

    assert withdrawn == [True, True] and stage.stage.num_queued == 0
    ends = [stage.outcomes.get_nowait(), stage.outcomes.get_nowait()]
    assert [end.finish_reason for end in ends if isinstance(end, ReturnSample)] == ["abort", "abort"]
    assert not stage.stage.withdraw(held) and not stage.stage.withdraw_tokenizer_request("asked")


def test_a_question_in_a_threads_hands_does_not_take_the_place_of_a_later_one_of_its_id(
    holding: tuple[Stage, HoldingTokenizer],
) -> None:
    """Its client said hello again meanwhile, and the later one can be aborted."""
    stage, _ = holding
    first, second = (TokenizerRequest(request_id="same", channel=stage.outcomes, prompt="x") for _ in range(2))
    stage.stage.submit(first)
    assert stage.stage.withdraw_tokenizer_request("same")
    stage.stage.submit(second)

    stage.stage._handle(first)

    assert stage.stage.withdraw_tokenizer_request("same")


def test_what_one_request_raises_ends_that_request_alone(holding: tuple[Stage, HoldingTokenizer]) -> None:
    """It hears "internal", as does who asks the tokenizer, and the next one is admitted."""
    stage, _ = holding
    stage.start()
    stage.submit("a", prompt="break")
    stage.stage.submit(TokenizerRequest(request_id="b", channel=stage.outcomes, prompt="break"))

    ends = [stage.outcomes.get(timeout=PATIENCE), stage.outcomes.get(timeout=PATIENCE)]
    stage.submit("c", prompt="x")

    assert [end.error.code for end in ends if isinstance(end, ReturnSample) and end.error] == ["internal"] * 2
    assert admitted(stage, 1) == ["c"]


def test_many_log_probabilities_of_a_long_prompt_are_refused() -> None:
    """Their number is the prompt's length times one more than are asked for of each."""
    limits = ServingLimits(max_model_len=20_000, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    outcomes: queue.SimpleQueue[Admit | ReturnSample] = queue.SimpleQueue()
    requests = OpenRequests(lambda *_: None, lambda _: None)
    prepare = PrepareInputs(FakeTokenizer(), limits, requests, outcomes.put, 8, outcomes.put)
    most = MAX_PROMPT_LOGPROBS // 21

    for name, length in (("fits", most), ("too many", most + 1)):
        asked = ActiveRequest(
            request_id=name, channel=outcomes, prompt=[1] * length, params={"prompt_logprobs": 20, "max_tokens": 1}
        )
        prepare.stage.work(requests.add(asked))

    admit, refusal = outcomes.get_nowait(), outcomes.get_nowait()
    assert isinstance(admit, Admit) and isinstance(refusal, ReturnSample) and refusal.error is not None
    assert f"21 for each of {most + 1} tokens are more than {MAX_PROMPT_LOGPROBS}" in refusal.error.message


def test_a_prompt_is_hashed_before_it_is_admitted(stage: Stage) -> None:
    """Each sample has the keys of the prompt's full pages, in a list of its own."""
    stage.submit(prompt=list(range(11)), params={"n": 2})

    admit = stage.outcomes.get(timeout=PATIENCE)

    assert isinstance(admit, Admit)
    first, second = admit.sequences
    assert first.salt is not None and first.page_keys == page_keys(first.salt, range(11), 4)
    assert second.page_keys == first.page_keys and second.page_keys is not first.page_keys


def test_a_request_that_shares_nothing_is_not_hashed(stage: Stage) -> None:
    """It has no salt, so nothing of it is kept."""
    sequence = stage.sequence(prompt=list(range(11)), params={"enable_prefix_caching": False})

    assert sequence.salt is None and sequence.page_keys == []


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 99}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 28}, "ghij"),
    ],
)
def test_a_prompt_is_cut_to_its_end(stage: Stage, params: dict[str, Any], kept: str) -> None:
    """To so many tokens, or to what leaves room for the output."""
    assert bytes(stage.sequence(prompt="abcdefghij", params=params).prompt_token_ids) == kept.encode()


def test_what_is_cut_may_be_longer_than_the_context_but_not_by_far(stage: Stage) -> None:
    """All of it is tokenised first."""
    params = {"truncate_prompt_tokens": 5}

    assert "but the prompt has at least 300 tokens" in stage.refusal(prompt="x" * 300, params=params)
    assert "truncate_prompt_tokens must be at least 1, or -1" in stage.refusal(
        prompt="x", params={"truncate_prompt_tokens": 0}
    )
    assert len(stage.sequence(prompt="x" * 200, params=params).prompt_token_ids) == 5
