"""The gateway's page in a real Chromium: somebody talks to a model, with the daemon in the test's hands."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from browser import answer, chromium, page_in, say
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import gateway

from driver.errors import Overloaded
from driver.request import ActiveRequest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

METRICS = """\
# HELP vllm:generation_tokens_total Tokens generated
vllm:generation_tokens_total{{engine="0",model_name="parrot"}} {grown}
vllm:num_requests_running{{engine="0",model_name="parrot"}} 3
vllm:num_requests_running{{engine="0",model_name="another"}} 5
odriver_pages_total{{engine="0",model_name="parrot"}} 400
odriver_pages_free{{engine="0",model_name="parrot"}} 1e+02
odriver_pages_cached{{engine="0",model_name="parrot"}} 200
odriver_state{{engine="0",model_name="parrot",state="draining"}} 0
odriver_state{{engine="0",model_name="parrot",state="serving"}} 1
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.01",model_name="parrot"}} 7
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.02",model_name="parrot"}} {grown}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="parrot"}} {grown}
"""
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One for all the tests here."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: "Browser", driver: FakeDriver, address: str) -> Iterator["Page"]:
    """On a desk, in front of a gateway to the driver."""
    del driver
    with gateway(address) as client, page_in(browser, str(client.base_url)) as page:
        yield page


def expect(thing: Any) -> Any:
    """Playwright's, which waits."""
    from playwright.sync_api import expect

    return expect(thing)


def reply(driver: FakeDriver, request: ActiveRequest, *pieces: str) -> None:
    """An answer to its end."""
    for piece in pieces:
        driver.say(request, piece, [len(piece)])
    driver.finish(request, num_tokens=len(pieces))


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


def test_keys_are_enough(page: "Page", driver: FakeDriver) -> None:
    """The first is a way past everything; Enter sends, with Shift it is a new line; focus is seen."""
    page.locator("body").press("Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab") if not page.locator("#prompt").evaluate("it => it === document.activeElement") else None
    page.keyboard.type("hold")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("on")
    page.keyboard.press("Enter")
    request = driver.take()
    assert request.messages == [{"role": "user", "content": "hold\non"}]
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    assert page.get_by_role("button", name="Stop").evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(answer(page)).to_contain_text("stopped by you")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_a_screen_reader_is_told_sentences(page: "Page", driver: FakeDriver) -> None:
    """Politely, when they are whole, and each once."""
    say(page, "hold a story")
    request = driver.take()
    told = page.get_by_role("log")
    sentence = f"There was a fox who lived in a{' very' * 20} old hollow, and was fond of rain and thunder. "
    driver.say(request, sentence + "And", [1])
    expect(told).to_contain_text("fond of rain and thunder.")
    expect(told).not_to_contain_text("And")
    reply(driver, request, " so on.")

    expect(told).to_have_text(f"Answering.{sentence}And so on.")
    expect(told).to_have_attribute("aria-live", "polite")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_shut_out(browser: "Browser", driver: FakeDriver, address: str, scheme: Any) -> None:
    """axe finds nothing to complain of, in contrast, names, roles or order, with an answer there."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with gateway(address) as client, page_in(browser, str(client.base_url), color_scheme=scheme) as page:
        say(page, "hold everything")
        markdown = "# A\n\ntext `code` [link](https://a.example)\n\n```python\nx = 1  # one\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |"
        reply(driver, driver.take(), markdown, "\n\n- [ ] task\n- other\n\n> quote")
        expect(answer(page).locator("blockquote")).to_be_visible()
        found = axe.run(page).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_light_and_dark(browser: "Browser", driver: FakeDriver, address: str) -> None:
    """As the system has it, until somebody says otherwise; that is remembered."""
    del driver
    ground = "getComputedStyle(document.body).backgroundColor"
    with gateway(address) as client, page_in(browser, str(client.base_url), color_scheme="dark") as page:
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Colours: as the system has them").click()
        light = page.evaluate(ground)
        page.reload()
        assert page.evaluate(ground) == light == "rgb(255, 255, 255)" != dark
        page.get_by_role("button", name="Colours: light").click()
        assert page.evaluate(ground) == dark


def test_on_a_phone(browser: "Browser", driver: FakeDriver, address: str) -> None:
    """One column that does not move sideways; drawers open, keep everything else out of reach, and close."""
    with gateway(address) as client, page_in(browser, str(client.base_url), **PHONE) as page:
        page.get_by_label("Message", exact=True).fill("hold wide")
        page.get_by_role("button", name="Send").tap()
        reply(driver, driver.take(), "a" * 300, "\n\n```\n" + "b " * 300 + "\n```")
        expect(answer(page).locator("pre")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]  # type: ignore[index]
        assert page.evaluate("document.querySelector('#messages').scrollWidth") <= 390
        button = page.get_by_role("button", name="Engine and sampling")
        button.tap()
        expect(page.get_by_label("Temperature").first).to_be_visible()
        expect(page.get_by_label("Message", exact=True)).not_to_be_focused()
        assert page.locator("main").evaluate("it => it.inert")
        page.keyboard.press("Escape")
        expect(button).to_be_focused()
        expect(button).to_have_attribute("aria-expanded", "false")
