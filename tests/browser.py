"""A headless Chromium for the tests of the gateway's page; they are skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fake_driver import FakeDriver

from driver.request import ActiveRequest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""What it is called on a PATH."""
PATIENCE = 60_000
"""Milliseconds after which a test takes something for never going to happen."""


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Playwright's own, or one on the PATH."""
    reason = 'needs playwright: pip install -e ".[browser]"'
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    with api.sync_playwright() as playwright:
        own: str | None = playwright.chromium.executable_path
        found = own if own and os.path.exists(own) else next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip("needs a Chromium: one on the PATH, or what `playwright install chromium` gets")
        browser = playwright.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_in(browser: "Browser", url: str, **context: Any) -> Iterator["Page"]:
    """The page in a browser of nobody's, with what ``new_context`` takes; nothing has gone wrong in it at the end."""
    wrong: list[str] = []
    with browser.new_context(**context) as fresh:
        fresh.set_default_timeout(PATIENCE)
        page = fresh.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(url)
        page.locator("#model option:not([value='']), #notice:not(:empty)").first.wait_for(state="attached")
        yield page
    assert wrong == []


def say(page: "Page", text: str) -> None:
    """Write it and press Enter."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: "Page") -> Any:
    """The last one."""
    return page.locator(".answer").last


def expect(thing: Any) -> Any:
    """Playwright's, which waits."""
    from playwright.sync_api import expect

    return expect(thing)


def reply(driver: FakeDriver, request: ActiveRequest, *pieces: str) -> None:
    """An answer to its end."""
    for piece in pieces:
        driver.say(request, piece, [len(piece)])
    driver.finish(request, num_tokens=len(pieces))
