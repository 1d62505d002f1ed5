"""From token ids to the text a client sees."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from fake_driver import PATIENCE
from fakes import EOS, FakeTokenizer

from driver.metrics.request_metrics import RequestMetrics
from driver.open_requests import OpenRequests
from driver.process_summary import ProcessSummary
from driver.request import ActiveRequest, Logprob, QueueChannel, RequestError, ReturnSample, Usage
from driver.resumption import read_again
from driver.stages.queues import BoundedQueue
from driver.stages.safe_thread import SafeThread
from driver.thread_messages import Ended, Finished, Opened, StepOutputs, Summary
from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.scheduling.sequence import Sequence, SequenceOutput, TokenLogprobs


class Stage:
    """A running ProcessSummary; what it delivers and what it posts end up in ``heard``, in order."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[ReturnSample | Finished] = queue.SimpleQueue()
        self.open_requests = OpenRequests(lambda *_: None, lambda _: None)
        self.metrics = RequestMetrics(max_model_len=100)
        self.summaries: BoundedQueue[Summary] = BoundedQueue(100)
        stage = ProcessSummary(
            FakeTokenizer(), self.open_requests, self.summaries, self.heard.put, self.metrics, lambda _: None
        )
        self.thread = SafeThread("summary", stage.run, on_death=lambda *_: None)
        self.thread.start()

    def open(
        self, request_id: str = "a", stops: tuple[str, ...] = (), prompt: str = "p", resumed: bytes = b"", **params: Any
    ) -> str:
        """Opens a request, whose first sample may go on with these tokens; the id of its first sequence."""
        request = self.open_requests.add(ActiveRequest(request_id=request_id, channel=self.heard))
        asked = SamplingParams(stop=list(stops), **params)
        request.num_samples = asked.n
        sequences = [
            Sequence(sequence_id, list(prompt.encode()), asked, frozenset(), max_tokens=50, seed=0)
            for sequence_id in request.sequence_ids
        ]
        tail, outputs = list(prompt.encode()), [SequenceOutput(request.sequence_id, list(resumed), None)]
        known = read_again(outputs, asked, tail, FakeTokenizer(), lambda: False) or []
        self.summaries.put(Opened(request, sequences, tail, len(prompt), asked, known))
        return request.sequence_id

    def land(self, sequence_id: str, tokens: bytes | list[int], finish_reason: str | None = None) -> None:
        """Hands over what one step gave one sequence."""
        self.summaries.put(StepOutputs([SequenceOutput(sequence_id, list(tokens), finish_reason)]))

    def next(self) -> ReturnSample:
        """The next sample."""
        heard = self.heard.get(timeout=PATIENCE)
        assert isinstance(heard, ReturnSample)
        return heard


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A stage that is stopped after the test."""
    running = Stage()
    yield running
    running.summaries.close()
    assert running.thread.join(timeout=PATIENCE) and running.thread.error is None


def test_tokens_become_text_and_the_last_sample_counts_them(stage: Stage) -> None:
    """Each output is a sample with its ids and its text; the last one has the reason and the usage."""
    sequence = stage.open(prompt="prompt")

    stage.land(sequence, b"h")
    stage.land(sequence, b"i!", "length")

    assert stage.next() == ReturnSample(request_id="a", text="h", token_ids=[104])
    assert stage.next() == ReturnSample(
        request_id="a", text="i!", token_ids=[105, 33], finish_reason="length", usage=Usage(6, 3)
    )


def test_the_token_that_ends_a_sequence_is_counted_but_not_shown(stage: Stage) -> None:
    """A stop token is among the ids and in the usage; its text is not shown, special or not."""
    sequence = stage.open()

    stage.land(sequence, [*b"hi", EOS], "stop")
    stage.land(stage.open("b"), b"ho\n", "stop")

    assert (first := stage.next()).text == "hi" and first.token_ids == [*b"hi", EOS]
    assert (second := stage.next()).text == "ho" and second.usage == Usage(1, 3)


def test_half_a_character_is_shown_with_its_other_half(stage: Stage) -> None:
    """Ids are delivered as they land, text as soon as it is whole."""
    sequence = stage.open()

    for byte in "é".encode():
        stage.land(sequence, [byte])

    assert [stage.next().text for _ in range(2)] == ["", "é"]


def test_an_end_shows_what_was_held(stage: Stage) -> None:
    """Half a character and the beginning of a stop string are shown at the end, when nothing came of them."""
    sequence = stage.open(stops=("END",))

    stage.land(sequence, b"xEN")
    stage.land(sequence, [0xC3], "length")

    assert [stage.next().text, stage.next().text] == ["x", "EN\ufffd"]


def test_a_stop_string_ends_the_request_before_the_client_hears(stage: Stage) -> None:
    """The engine is told first; the text ends before the stop string, ids and usage with its last token."""
    sequence = stage.open(stops=("END", "zz"))

    stage.land(sequence, b"abE")
    stage.land(sequence, b"NDcd")

    assert stage.next().text == "ab"
    assert stage.heard.get(timeout=PATIENCE) == Finished(sequence)
    assert stage.next() == ReturnSample(
        request_id="a", token_ids=list(b"ND"), finish_reason="stop", stop_reason="END", usage=Usage(1, 5)
    )


def test_a_stop_string_in_the_last_output_is_the_reason(stage: Stage) -> None:
    """A stop string that the last token by length completes gives reason stop, and nothing to tell the engine."""
    stage.land(stage.open(stops=("END",)), b"abEND", "length")

    sample = stage.next()

    assert (sample.text, sample.finish_reason) == ("ab", "stop")


def test_late_tokens_are_dropped(stage: Stage) -> None:
    """After the last sample, and for requests never opened, outputs and aborts vanish; a new request of the same id
    is not touched by them."""
    old = stage.open(stops=("b",))
    stage.land(old, b"ab")
    assert isinstance(stage.heard.get(timeout=PATIENCE), Finished) and stage.next().is_last

    new = stage.open()
    stage.land(old, b"late")
    stage.summaries.put(Ended(old, "abort"))
    stage.land("nobody#9", b"x", "stop")
    stage.land(new, b"z", "length")

    assert stage.next() == ReturnSample(
        request_id="a", text="z", token_ids=[122], finish_reason="length", usage=Usage(1, 1)
    )


def test_an_abort_shows_what_was_held(stage: Stage) -> None:
    """The last sample of an aborted request has reason abort, its usage, and the text that was held."""
    sequence = stage.open(stops=("END",))

    stage.land(sequence, b"E")
    stage.summaries.put(Ended(sequence, "abort"))

    assert stage.next().text == ""
    assert stage.next() == ReturnSample(request_id="a", text="E", finish_reason="abort", usage=Usage(1, 1))


def test_one_message_may_carry_many_requests(stage: Stage) -> None:
    """The outputs of one step go to their own channels, each with its own text."""
    sequences = [stage.open(name) for name in "ab"]

    stage.summaries.put(StepOutputs([SequenceOutput(sequence, [65 + n]) for n, sequence in enumerate(sequences)]))

    assert [(sample.request_id, sample.text) for sample in (stage.next(), stage.next())] == [("a", "A"), ("b", "B")]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
def test_include_stop_str_in_output_shows_what_ended_it(stage: Stage, include: bool, text: str) -> None:
    """A stop string, and a stop token, belong to the text if asked for; what comes after them never does."""
    by_string = stage.open(stops=("END",), include_stop_str_in_output=include)
    stage.land(by_string, b"abENDcd", "length")
    by_token = stage.open("b", include_stop_str_in_output=include, skip_special_tokens=False)
    stage.land(by_token, [*b"hi", EOS], "stop")

    assert (first := stage.next()).text == text and first.usage == Usage(1, 5)
    assert stage.next().text == ("hi<end>" if include else "hi")


def test_min_tokens_holds_back_every_kind_of_stop(stage: Stage) -> None:
    """Stop strings and loops are not looked for before min_tokens tokens."""
    stage.land(stage.open(stops=("a",), min_tokens=3), b"aaxa", "length")
    loop = RepetitionDetection(max_pattern_size=1)
    stage.land(stage.open("b", repetition_detection=loop, min_tokens=5), b"aaaaaa")

    assert (stopped := stage.next()).text == "aax" and stopped.finish_reason == "stop"
    stage.heard.get(timeout=PATIENCE)
    assert (looped := stage.next()).text == "aaaaa" and looped.finish_reason == "repetition"


def test_a_loop_ends_the_request_with_reason_repetition(stage: Stage) -> None:
    """At the token that completes it, and the engine is told before the client."""
    sequence = stage.open(repetition_detection=RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3))

    stage.land(sequence, b"aaaxabababz")

    assert stage.heard.get(timeout=PATIENCE) == Finished(sequence)
    assert stage.next() == ReturnSample(
        request_id="a", text="aaaxababab", token_ids=list(b"aaaxababab"), finish_reason="repetition", usage=Usage(1, 10)
    )


def test_without_detokenize_there_are_ids_and_no_text(stage: Stage) -> None:
    """Half a character neither, and log-probabilities bear no texts."""
    sequence = stage.open(detokenize=False, logprobs=0)

    stage.summaries.put(StepOutputs([SequenceOutput(sequence, [0xC3], "length", [TokenLogprobs([0xC3], [-1.5], [4])])]))

    assert stage.next() == ReturnSample(
        request_id="a", token_ids=[0xC3], logprobs=[{0xC3: Logprob(-1.5, 4)}], finish_reason="length", usage=Usage(1, 1)
    )


def test_special_tokens_are_shown_if_asked_for(stage: Stage) -> None:
    """skip_special_tokens=False spells them."""
    stage.land(stage.open(skip_special_tokens=False), [*b"a", EOS, *b"b"], "length")
    stage.land(stage.open("b"), [*b"a", EOS, *b"b"], "length")

    assert [stage.next().text, stage.next().text] == ["a<end>b", "ab"]


def test_logprobs_are_named_by_token_id(stage: Stage) -> None:
    """The token's own entry first, with its rank; the prompt's first token has none; what was cut off has none either."""
    sequence = stage.open(stops=("b",), logprobs=2, prompt_logprobs=1)
    told = [TokenLogprobs([97, 98, 99], [-2.0, -0.5, -1.0], [3, 1, 2]) for _ in range(3)]

    prompt = [TokenLogprobs([112, 112], [-0.1, -0.1], [1, 1])]
    stage.summaries.put(StepOutputs([SequenceOutput(sequence, [], prompt_logprobs=prompt)]))
    stage.summaries.put(StepOutputs([SequenceOutput(sequence, list(b"abc"), None, told)]))

    assert stage.next() == ReturnSample(request_id="a", prompt_logprobs=[None, {112: Logprob(-0.1, 1, "p")}])
    stage.heard.get(timeout=PATIENCE)
    last = stage.next()
    assert [list(token) for token in last.logprobs] == [[97, 98, 99]] * 2
    assert last.logprobs[0][97] == Logprob(-2.0, 3, "a") and last.prompt_logprobs == []


def test_each_sample_of_a_request_has_its_index_and_end(stage: Stage) -> None:
    """Of n samples each ends for itself; the request ends, and tells its usage, with the last of them."""
    first = stage.open(n=2, stops=("b",))
    second = f"{first}/1"

    stage.land(second, b"xb")
    stage.land(first, b"yz", "length")

    assert stage.heard.get(timeout=PATIENCE) == Finished(second)
    assert stage.next() == ReturnSample(
        request_id="a", index=1, text="x", token_ids=[120, 98], finish_reason="stop", stop_reason="b"
    )
    assert stage.next() == ReturnSample(
        request_id="a", text="yz", token_ids=[121, 122], finish_reason="length", usage=Usage(1, 4)
    )
    assert len(stage.open_requests) == 0


@pytest.mark.parametrize(("internal", "code"), [(True, "internal"), (False, "invalid_request")])
def test_an_error_of_one_sample_ends_the_whole_request(stage: Stage, internal: bool, code: str) -> None:
    """The client hears once, by whose fault it was; the engine is told to end the samples that still run."""
    first = stage.open(n=3)
    fault = SequenceOutput(f"{first}/1", [], "error", error="it failed", internal=internal)

    stage.summaries.put(StepOutputs([fault, SequenceOutput(first, [], "error", error="it failed", internal=internal)]))

    assert [stage.heard.get(timeout=PATIENCE), stage.heard.get(timeout=PATIENCE)] == [
        Finished(first),
        Finished(f"{first}/2"),
    ]
    assert stage.next() == ReturnSample(request_id="a", error=RequestError(code, "it failed"))
    stage.land(stage.open("b"), b"x", "length")
    assert stage.next().request_id == "b"


def test_a_queue_channel_ends_after_the_last_sample() -> None:
    """Iterating over a channel gives the samples in order and ends by itself, after an error too."""
    channel = QueueChannel()
    samples = [
        ReturnSample(request_id="a", text="x"),
        ReturnSample(request_id="a", finish_reason="stop", usage=Usage(1, 1)),
    ]

    for sample in samples:
        channel.put(sample)

    assert list(channel) == samples


@pytest.mark.parametrize(
    ("resumed", "versions", "told"),
    [
        (b"", [1, 1], ([], [])),
        (b"", [1, 2], ([], [(1, 0), (2, 1)])),
        (b"", [2, 2], ([(2, 0)], [(2, 0)])),
        (b"0123456789", [1, 1], ([(1, 10)], [(1, 10)])),
        (b"0123456789", [2, 3], ([(2, 10)], [(2, 10), (3, 11)])),
    ],
)
def test_the_versions_of_the_weights_are_those_of_new_tokens(
    stage: Stage, resumed: bytes, versions: list[int], told: tuple[list[tuple[int, int]], list[tuple[int, int]]]
) -> None:
    """By their place in the output: by whose weights resumed ones were made is not known. A version is told as it
    begins, and all of them at the end."""
    sequence = stage.open(resumed=resumed)

    for version, reason in zip(versions, (None, "length"), strict=True):
        stage.summaries.put(StepOutputs([SequenceOutput(sequence, [*b"a"], reason)], version))

    assert (stage.next().weight_versions, stage.next().weight_versions) == told
