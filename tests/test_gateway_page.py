"""The gateway's page in a real Chromium: somebody talks to a model, with the daemon in the test's hands."""

import re
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import answer, expect, page_in, reply, say
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import gateway

from driver.errors import Overloaded
from driver.request import ReturnSample, Timings, Usage
from ipc.gateway.access.callers import Callers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

METRICS = """\
# HELP vllm:generation_tokens_total Tokens generated
vllm:generation_tokens_total{{engine="0",model_name="parrot"}} {grown}
vllm:num_requests_running{{engine="0",model_name="parrot"}} 3
vllm:num_requests_running{{engine="0",model_name="another"}} 5
odriver_pages{{engine="0",model_name="parrot"}} 400
odriver_pages_free{{engine="0",model_name="parrot"}} 1e+02
odriver_pages_cached{{engine="0",model_name="parrot"}} 200
odriver_state{{engine="0",model_name="parrot",state="draining"}} 0
odriver_state{{engine="0",model_name="parrot",state="serving"}} 1
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.01",model_name="parrot"}} 7
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.02",model_name="parrot"}} {grown}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="parrot"}} {grown}
"""


def test_an_answer_streams(page: "Page", driver: FakeDriver) -> None:
    """Each piece is there before the next is written, and how fast it went after the last."""
    say(page, "hold a story")
    request = driver.take()
    driver.say(request, "Once ", [1])
    expect(answer(page)).to_contain_text("Once")
    reply(driver, request, "upon ", "a time.")

    expect(answer(page)).to_contain_text("Once upon a time.")
    expect(answer(page).locator(".numbers")).to_contain_text("2 tokens")
    expect(page.locator(".user")).to_contain_text("hold a story")
    assert request.messages == [{"role": "user", "content": "hold a story"}]


def test_how_fast_an_answer_was_is_what_the_daemon_says(page: "Page", driver: FakeDriver) -> None:
    """However its pieces arrive, which may be all at once."""
    say(page, "hold a story")
    request = driver.take()
    seconds = dict.fromkeys(("queue_time_s", "prefill_time_s", "time_to_first_token_s", "decode_time_s"), 0.1)
    took = Timings(tokens_per_second=1234.5, **seconds)
    driver.say(request, "Once upon a time.", [1] * 400)
    end = ReturnSample(request_id=request.request_id, finish_reason="stop", usage=Usage(1, 400, 0, took))
    request.channel.put(end)

    expect(answer(page).locator(".numbers")).to_contain_text("400 tokens · 1,235 tokens/s · first after")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_is_stopped(page: "Page", driver: FakeDriver, how: str) -> None:
    """Its request is aborted in the daemon; what had come stays and is what was said."""
    say(page, "hold a story")
    request = driver.take()
    driver.say(request, "Once", [1])
    expect(answer(page)).to_contain_text("Once")
    page.keyboard.press("Escape") if how == "Escape" else page.get_by_role("button", name="Stop").click()

    assert driver.aborted.get(timeout=PATIENCE) == request.request_id
    expect(answer(page)).to_contain_text("stopped by you")
    say(page, "hold on")
    assert [message["content"] for message in driver.take().messages or []] == ["hold a story", "Once", "hold on"]


def test_conversations_outlive_a_reload(page: "Page", driver: FakeDriver) -> None:
    """Even in the middle of an answer, which is aborted and kept as far as it came."""
    say(page, "One two.")
    expect(answer(page).locator(".numbers")).to_contain_text("2 tokens")
    say(page, "hold three")
    request = driver.take()
    driver.say(request, "Half an", [1])
    expect(answer(page)).to_contain_text("Half an")
    page.reload()

    expect(page.locator(".user")).to_have_count(2)
    expect(answer(page)).to_contain_text("Half an")
    expect(answer(page)).to_contain_text("The answer broke off before its end.")
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_several_conversations_at_once(page: "Page", driver: FakeDriver) -> None:
    """Answers are written in one while another is shown, and each has its own."""
    say(page, "hold the first")
    first = driver.take()
    page.get_by_role("button", name="New conversation").click()
    say(page, "hold the second")
    second = driver.take()
    driver.say(first, "Uno.", [1])
    reply(driver, second, "Dos.")

    expect(answer(page)).to_contain_text("Dos.")
    page.get_by_role("button", name=re.compile("^hold the first")).click()
    expect(answer(page)).to_contain_text("Uno.")
    expect(page.locator("#list li.running")).to_have_count(1)
    reply(driver, first, " Bueno.")
    expect(answer(page)).to_contain_text("Uno. Bueno.")
    expect(page.locator("#list li.running")).to_have_count(0)


def test_a_conversation_is_renamed_deleted_and_brought_back(page: "Page") -> None:
    """All from the keyboard; a reload finds it as it was left."""
    say(page, "Hello")
    expect(answer(page).locator(".numbers")).to_contain_text("tokens")
    page.get_by_role("button", name="Rename “Hello”").press("Enter")
    page.keyboard.type("A greeting")
    page.keyboard.press("Enter")
    expect(page.locator("#list .open")).to_have_text(["A greeting"])
    page.get_by_role("button", name="Delete “A greeting”").press("Enter")
    expect(page.locator("#list .open")).to_have_count(0)
    page.get_by_role("button", name="Undo").press("Enter")
    page.reload()

    expect(page.locator("#list .open")).to_have_text(["A greeting"])
    expect(answer(page)).to_contain_text("Hello")


def test_the_controls_are_in_the_request(page: "Page", driver: FakeDriver) -> None:
    """Those that were set and no others, under the names of the API; they are the conversation's."""
    say(page, "hold plain")
    plain = driver.take()
    reply(driver, plain, "Yes.")
    expect(answer(page).locator(".numbers")).to_contain_text("tokens")
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "max_tokens": 12, "seed": 3}
    for name, value in wanted.items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#system").fill("Be brief.")
    page.locator("#stop").fill("END\nSTOP")
    page.locator("#repetition_penalty").fill("-3")  # which is out of its range
    page.reload()
    say(page, "hold set")
    request = driver.take()

    assert not plain.params.keys() & wanted.keys()
    assert wanted.items() <= request.params.items()
    assert request.params["stop"] == ["END", "STOP"]
    assert "repetition_penalty" not in request.params
    assert request.messages is not None and request.messages[0] == {"role": "system", "content": "Be brief."}


def test_an_answer_is_asked_for_anew(page: "Page", driver: FakeDriver) -> None:
    """Again takes the last one's place; to edit what was said forgets what came after, and undo knows it still."""
    say(page, "hold one")
    reply(driver, driver.take(), "First.")
    page.get_by_role("button", name="Answer again").click()
    again = driver.take()
    reply(driver, again, "Second.")
    expect(answer(page)).to_contain_text("Second.")
    assert again.messages == [{"role": "user", "content": "hold one"}]
    page.get_by_role("button", name="Edit and ask anew").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("hold one")
    page.get_by_role("button", name="Undo").click()
    expect(answer(page)).to_contain_text("Second.")


def test_a_refusal_says_what_to_do(page: "Page", driver: FakeDriver) -> None:
    """In words, with the way out beside them."""
    driver.refusal = Overloaded("1,024 requests wait already")
    say(page, "Hello there.")
    expect(page.get_by_role("alert")).to_contain_text("1,024 requests wait already. Try again in")
    driver.refusal = None
    page.get_by_role("button", name="Try again").click()

    expect(answer(page)).to_contain_text("Hellothere.")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_what_a_stream_may_say(page: "Page") -> None:
    """Pings are passed over, thoughts are apart; a fault of the daemon, and an end that is none, are told."""
    words = '{"choices": [{"index": 0, "delta": {"content": "So: 4."}, "finish_reason": "stop"}]}'
    thought = '{"choices": [{"index": 0, "delta": {"reasoning_content": "2 and *2*."}, "finish_reason": null}]}'
    fault = '{"error": {"message": "a step failed", "type": "internal_error", "param": null, "code": 500}}'
    told = [f": ping\r\n\r\ndata: {thought}\r\n\r\ndata: {words}\r\n\r\ndata: [DONE]\r\n\r\n", f"data: {fault}\n\n", ""]
    streams = iter(told)
    sse = "text/event-stream"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=next(streams), content_type=sse))
    say(page, "Think.")
    expect(answer(page).locator("p")).to_have_text(["2 and 2.", "So: 4."])
    expect(answer(page).locator("em")).not_to_be_visible()
    answer(page).get_by_text("Thoughts").click()
    expect(answer(page).locator("em")).to_have_text("2")
    say(page, "Fail.")
    expect(answer(page).get_by_role("alert")).to_contain_text("A step failed. This is the daemon's fault")
    page.get_by_role("button", name="Try again").click()
    expect(answer(page).get_by_role("alert")).to_contain_text("The answer broke off before its end.")


def test_a_browser_that_keeps_no_more(page: "Page") -> None:
    """The conversation goes on, and whoever reads knows that it is not kept."""
    page.evaluate(
        "() => { for (let size = 2 ** 22; size; size >>= 1) try { localStorage['x' + size] = 'x'.repeat(size); } catch {} }"
    )
    say(page, "Hello there.")
    expect(answer(page)).to_contain_text("Hellothere.")
    expect(page.get_by_role("status")).to_contain_text("This browser keeps no more conversations: delete some.")


def test_a_key_is_asked_for(browser: "Browser", driver: FakeDriver, address: str, tmp_path: Path) -> None:
    """Where the gateway wants one; a reload knows it still, and to watch the engine is not to ask too often."""
    del driver
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[alice]\napi_key = "sk-0123456789abcdef"\nrequests_per_minute = 1\n')
    with gateway(address, callers=Callers(keys)) as client, page_in(browser, str(client.base_url)) as page:
        expect(page.get_by_role("status")).to_contain_text("This gateway wants an API key.")
        for key, what in (("sk-of-somebody-else", "This API key is not known here"), ("sk-0123456789abcdef", "")):
            page.get_by_role("button", name="Give it a key").click()
            page.get_by_role("textbox", name="API key").fill(key)
            page.keyboard.press("Enter")
            expect(page.get_by_role("status")).to_contain_text(what)
        expect(page.locator("#model")).to_have_value("parrot")
        bearer = {"Authorization": "Bearer sk-0123456789abcdef"}
        assert {client.get("/metrics", headers=bearer).status_code for _ in range(3)} == {200}
        page.reload()
        say(page, "Hello there.")
        expect(answer(page)).to_contain_text("Hellothere.")
        say(page, "And again.")
        expect(page.get_by_role("alert")).to_contain_text("Alice may ask 1 times a minute")


def test_a_gateway_that_is_gone(browser: "Browser", driver: FakeDriver, address: str) -> None:
    """The page says so, and what was written is not lost."""
    del driver
    with ExitStack() as stack:
        with gateway(address) as client:
            page = stack.enter_context(page_in(browser, str(client.base_url)))
        say(page, "Is anybody there?")
        expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer.")
        expect(page.locator("#engine-problem")).to_contain_text("No live view")
        expect(page.locator(".user")).to_contain_text("Is anybody there?")


def test_the_engine_is_seen(browser: "Browser", address: str) -> None:
    """Rows, pages and latencies are those of the metrics, as they change; what is not there is a dash."""
    looks = count(1)
    with (
        serving(address, FakeDriver(), metrics=lambda: METRICS.format(grown=100 * next(looks))),
        gateway(address) as client,
        page_in(browser, str(client.base_url)) as page,
    ):
        expect(page.locator("#engine-state")).to_have_text("serving")
        expect(page.locator("#running")).to_have_text("3")
        expect(page.locator("#pages")).to_have_text("25 % of 400")
        expect(page.locator("#pages-kept")).to_have_text("50 %")
        expect(page.locator("#rate")).to_have_text(re.compile("^[1-9]"))
        expect(page.locator("#ttft-p50")).to_have_text("15 ms")
        expect(page.locator("#itl-p50")).to_have_text("\N{EN DASH}")
