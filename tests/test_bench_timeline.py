"""The figures of timelines, from made-up times to exact numbers."""

import pytest

from ipc.benchmark.timeline import Timeline, completed, load_figures, percentile
from scripts.benchmarks.clients.rates import decode_rate, throughput

pytestmark = pytest.mark.thorough


def build_timeline(*arrivals, sent_at=0.0, prompt_tokens=10, error=None):
    """A request whose tokens came at these times, one at a time where no count is given."""
    pairs = [arrival if isinstance(arrival, tuple) else (arrival, 1) for arrival in arrivals]
    return Timeline(prompt_tokens, sent_at, pairs, error)


def test_a_timeline_tells_its_latencies():
    """TTFT is from sending to the first piece; there is an ITL between each piece and the next."""
    timeline = build_timeline(1.5, (1.75, 2), 2.25, sent_at=1.0)

    assert (timeline.tokens, timeline.ttft, timeline.itls) == (4, 0.5, [0.25, 0.5])


def test_percentiles_are_linear_between_values():
    """As numpy and vLLM have them; of nothing, nothing."""
    assert percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0
    assert percentile([0.0, 100.0], 99) == 99.0
    assert percentile([], 50) == 0.0


def test_the_decode_rate_of_one_leaves_out_the_first_token():
    """Four tokens a second, however long the prompt took."""
    timeline = build_timeline(7.0, 7.25, 7.5, 7.75, 8.0)

    assert decode_rate([timeline]) == 4.0


def test_the_decode_rate_of_many_counts_only_while_all_decode():
    """From the last first token to the first last one: here 2 s to 4 s, with 2 tokens of one and 4 of the other."""
    early = build_timeline(1.0, 2.0, 3.0, 4.0)
    late = build_timeline(2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)

    assert decode_rate([early, late]) == 3.0


def test_there_is_no_decode_rate_of_requests_that_never_decode_together():
    """It says what to do about it."""
    with pytest.raises(ValueError, match="ask for more tokens"):
        decode_rate([build_timeline(1.0, 2.0), build_timeline(3.0, 4.0)])


def test_throughput_is_of_all_tokens_over_the_whole_time():
    """From the first request sent to the last token received."""
    timelines = [build_timeline(2.0, 3.0, sent_at=1.0), build_timeline((5.0, 4), sent_at=2.0)]

    assert throughput(timelines) == 1.5


def test_requests_without_an_answer_are_not_completed():
    """Neither the failed nor the empty."""
    whole, failed, empty = build_timeline(1.0), build_timeline(1.0, error="why"), build_timeline()

    assert completed([whole, failed, empty]) == [whole]


def test_load_figures_are_those_of_vllm():
    """Its names and its meanings, in milliseconds and per second; failed requests count as failed only."""
    timelines = [
        build_timeline(1.0, 1.5, 2.0),
        build_timeline((3.0, 2), sent_at=1.0, prompt_tokens=30),
        build_timeline(1.0, error="overloaded"),
    ]

    figures = load_figures(timelines, duration=4.0)

    assert figures == {
        "duration": 4.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 40,
        "total_output_tokens": 5,
        "request_throughput": 0.5,
        "output_throughput": 1.25,
        "total_token_throughput": 11.25,
        "mean_ttft_ms": 1500.0,
        "median_ttft_ms": 1500.0,
        "std_ttft_ms": 500.0,
        "p99_ttft_ms": 1990.0,
        "mean_tpot_ms": 250.0,
        "median_tpot_ms": 250.0,
        "std_tpot_ms": 250.0,
        "p99_tpot_ms": 495.0,
        "mean_itl_ms": 500.0,
        "median_itl_ms": 500.0,
        "std_itl_ms": 0.0,
        "p99_itl_ms": 500.0,
        "mean_e2el_ms": 2000.0,
        "median_e2el_ms": 2000.0,
        "std_e2el_ms": 0.0,
        "p99_e2el_ms": 2000.0,
    }


def test_a_load_that_failed_altogether_has_figures_of_zero():
    """Rather than none."""
    figures = load_figures([build_timeline(error="why")], duration=1.0)

    assert (figures["completed"], figures["failed"], figures["p99_ttft_ms"]) == (0, 1, 0.0)
