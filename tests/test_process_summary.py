"""From token ids to the text a client sees."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import EOS, FakeTokenizer

from driver.bounded_queue import BoundedQueue
from driver.messages import Ended, Finished, Landed, Opened, Summary
from driver.open_requests import OpenRequests
from driver.process_summary import ProcessSummary
from driver.request import ActiveRequest, QueueChannel, ReturnSample, Usage
from driver.safe_thread import SafeThread
from driver.stop_regex import StopRegex
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceOutput


class Stage:
    """A running ProcessSummary; what it delivers and what it posts end up in ``heard``, in order."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[ReturnSample | Finished] = queue.SimpleQueue()
        self.open_requests = OpenRequests()
        self.summaries: BoundedQueue[Summary] = BoundedQueue(100)
        stage = ProcessSummary(FakeTokenizer(), self.open_requests, self.summaries, self.heard.put)
        self.thread = SafeThread("summary", stage.run, on_death=lambda *_: None)
        self.thread.start()

    def open(self, request_id: str = "a", stops: tuple[str, ...] = (), prompt: str = "p", **params: Any) -> str:
        """Opens a request; the id of its first sequence."""
        request = self.open_requests.add(ActiveRequest(request_id=request_id, channel=self.heard))
        asked = SamplingParams(stop=list(stops), **params)
        request.num_samples = asked.n
        regexes = [StopRegex(pattern) for pattern in asked.stop_regexes]
        self.summaries.put(Opened(request, list(prompt.encode()), len(prompt), asked, regexes))
        return request.sequence_id

    def land(self, sequence_id: str, tokens: bytes | list[int], finish_reason: str | None = None) -> None:
        """Hands over what one step gave one sequence."""
        self.summaries.put(Landed([SequenceOutput(sequence_id, list(tokens), finish_reason)]))

    def next(self) -> ReturnSample:
        """The next sample."""
        heard = self.heard.get(timeout=30)
        assert isinstance(heard, ReturnSample)
        return heard


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A stage that is stopped after the test."""
    running = Stage()
    yield running
    running.summaries.close()
    assert running.thread.join(timeout=30) and running.thread.error is None


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
    assert stage.heard.get(timeout=30) == Finished(sequence)
    assert stage.next() == ReturnSample(request_id="a", token_ids=list(b"ND"), finish_reason="stop", usage=Usage(1, 5))


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
    assert isinstance(stage.heard.get(timeout=30), Finished) and stage.next().is_last

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

    stage.summaries.put(Landed([SequenceOutput(sequence, [65 + n]) for n, sequence in enumerate(sequences)]))

    assert [(sample.request_id, sample.text) for sample in (stage.next(), stage.next())] == [("a", "A"), ("b", "B")]


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
