"""``odriver top``: two looks at a daemon as a picture."""

import io
from typing import Any

import pytest
from rich.console import Console
from test_driver import build_driver

from ipc.commands.operators.top import run, view


def build_status(**changes: Any) -> dict[str, Any]:
    """What a client's ``status`` gives."""
    with build_driver() as driver:
        fields = {name: getattr(driver.status(), name) for name in driver.status().__struct_fields__}
    return {"model": "parrot", "clients": 3, **fields, "uptime_seconds": 7300.0, **changes}


def shown(*looks: dict[str, Any], seconds: float = 2.0) -> str:
    """The text of it."""
    console = Console(file=io.StringIO(), width=120)
    console.print(view(*looks, seconds))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_are_of_what_happened_in_between() -> None:
    """Tokens, steps and the gaps between them; rows, pages and latencies are as of the second look."""
    before = build_status(
        generated_tokens=1000, prompt_tokens=10, steps=50, step_gap_seconds_count=5, step_seconds={"plan": 1.0, "wait": 2.0}
    )  # fmt: skip
    now = build_status(
        generated_tokens=1500, prompt_tokens=30, steps=70, running=4, waiting=1, deferred=1, queued_requests=1, pages_total=200,
        pages_owned=50, pages_cached=20, ttft_seconds_p50=0.0125, ttft_seconds_p99=1.5, step_gap_seconds_sum=0.02,
        step_gap_seconds_count=25, step_seconds={"plan": 1.002, "wait": 2.1}, preemptions=6, adapters={"mine": 1, "yours": 12}, requests_by_client={"alice": (7, 3), "bob": (9, 0)},
    )  # fmt: skip

    text = shown(before, now)

    for words in (
        "parrot, up 2 h, 3 clients",
        "250.0 generated, 10.0 of prompts, in 10.0 steps",
        "4 of 4 slots, 2 waiting, 1 to be prepared",
        "plan 0.1 ms, wait 5.0 ms",
        "25% of 200 in use, 10% cached",
        "12.5 ms median, 1,500.0 ms p99",
        "1.0 ms mean",
        "1,500 tokens, 6 preemptions",
        "2 loaded; open requests: yours 12, mine 1",
    ):
        assert words in text, words
    assert "READY" not in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["bob", "9", "0"], ["alice", "7", "3"]]


def test_drafts_are_shown_where_there_may_be_any() -> None:
    """How many of them were accepted, and what a row that had some gave in a step, with its own next token."""
    before = build_status(num_accepted_tokens_per_pos=(1, 0))
    now = build_status(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=18, num_accepted_tokens_per_pos=(9, 5))

    assert "20.0 tokens a second, 45% accepted, 2.80 tokens a row" in shown(before, now)
    assert "45% accepted (50% of these from earlier requests), 2.80" in shown(
        before, now | {"num_earlier_accepted_tokens": 9}
    )
    assert "drafts" in shown(before, before) and "drafts" not in shown(build_status(), build_status())


def test_what_should_not_be_is_said() -> None:
    """A compilation while serving, and a step that does not land."""
    text = shown(build_status(), build_status(compilations_after_ready=1, stages={"prepare": 0.0, "execution": 9.0}))

    assert "1 compilations after READY" in text
    assert "nothing has got done in the execution stage for 9 s" in text


def test_a_daemon_that_does_not_serve_says_so() -> None:
    """One that is paused, or drains, looks like one without work otherwise."""
    assert "the daemon is paused" in shown(build_status(), build_status(state="paused"))
    assert "the daemon is" not in shown(build_status(), build_status(state="serving"))


def test_no_name_is_markup() -> None:
    """Neither a model's nor a client's, and neither moves the cursor."""
    text = shown(
        build_status(), build_status(model="[bold]m\x1b[2J", requests_by_client={"[red]c\n\x1b]0;x\x07": (1, 0)})
    )

    assert r"[bold]m\x1b[2J" in text and r"[red]c\n\x1b]0;x\x07" in text and "\x1b" not in text


def test_looks_that_go_to_a_file_are_one_below_the_other() -> None:
    """Where nothing can be drawn over: ``odriver top | tee FILE``."""
    looks = iter([build_status(generated_tokens=count) for count in (1, 2, 3)])
    console = Console(file=io.StringIO(), width=120)

    def status() -> dict[str, Any]:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        return look

    with pytest.raises(KeyboardInterrupt):
        run(status, 0.001, once=False, console=console)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 tokens, 0 preemptions" in text and "3 tokens, 0 preemptions" in text and "\x1b" not in text


def test_once_prints_and_ends() -> None:
    """For scripts: two looks, an interval apart."""
    looks = iter([build_status(generated_tokens=1), build_status(generated_tokens=2)])
    console = Console(file=io.StringIO(), width=120)

    run(lambda: next(looks), 0.001, once=True, console=console)

    assert "since the start" in console.file.getvalue()  # type: ignore[attr-defined]
    assert next(looks, None) is None
