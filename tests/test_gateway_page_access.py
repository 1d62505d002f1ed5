"""The gateway's page for everybody: by the keyboard, by ear, in the light, in the dark, on a phone."""

from typing import TYPE_CHECKING, Any

import pytest
from browser import answer, expect, page_in, reply, say
from fake_driver import FakeDriver
from gateways import gateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}


def test_keys_are_enough(page: "Page", driver: FakeDriver) -> None:
    """What is typed at first is the message; Enter sends, with Shift it is a new line; focus is seen."""
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.get_by_role("link", name="Skip to the message box").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
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
