"""Pictures of the page as it is with the model we ship, while others talk to that too."""

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from ipc.client import Client
from scripts.processes import odriver

PLACE = Path(__file__).parent.parent / "docs"
DESK = {"viewport": {"width": 1360, "height": 850}, "color_scheme": "light"}
PHONE = {
    "viewport": {"width": 390, "height": 780},
    "color_scheme": "dark",
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
OTHERS = 12
"""Streams of others at the most."""
WHILE = 100.0
"""Seconds in which they come and go before the picture is taken."""
SOME = 250
"""Characters of an answer that is still being written."""
PATIENCE = 120_000
"""Milliseconds after which something is taken for never going to happen."""


def main() -> None:
    """One on a desk, one on a phone."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        address = f"ipc://{directory}/o.sock"
        chromium = playwright.chromium
        own = chromium.executable_path if os.path.exists(chromium.executable_path) else shutil.which("chromium")
        with (
            odriver("serve", "--bind", address, "--num-pages", "512"),
            odriver("gateway", "--connect", address, "--port", "0") as web,
        ):
            browser = chromium.launch(executable_path=own)
            with _others(address):
                desk = browser.new_page(**_context(DESK))
                _open(desk, web.status)
                for question in ("Hello!", "What is 7 + 8?", "Who are you?"):
                    _ask(desk, question)
                    desk.get_by_role("button", name="New conversation").click()
                desk.locator("#temperature").fill("0.8")
                desk.locator("#seed").fill("5")
                _ask(desk, "Tell me a story.")
                desk.locator("#panel").evaluate("panel => panel.scrollTo(0, 0)")
                desk.wait_for_timeout(1000 * WHILE)
                _ask(desk, "Tell me a story about a fox.", until=SOME)
                _keep(desk, "page.png")
                phone = browser.new_page(**_context(PHONE))
                _open(phone, web.status)
                _ask(phone, "What is 7 + 8?")
                _ask(phone, "Tell me a story.", until=SOME)
                _keep(phone, "page_phone.png")
            browser.close()


def _context(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "reduced_motion": "reduce"}


def _open(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_have_value(re.compile("."))


def _ask(page: Page, question: str, until: int | None = None) -> None:
    """To the end of the answer, or until it has so many characters."""
    answer = page.locator(".answer").nth(page.locator(".answer").count())
    page.locator("#prompt").fill(question)
    page.locator("#send").click()
    if until is None:
        expect(answer.locator(".numbers")).to_contain_text("tokens", timeout=PATIENCE)
    else:
        expect(answer).to_have_text(re.compile(f".{{{until}}}", re.DOTALL), timeout=PATIENCE)


def _keep(page: Page, name: str) -> None:
    """As it looks now, in the 256 colours that are the most of it."""
    Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        PLACE / name, optimize=True
    )


@contextmanager
def _others(address: str) -> Iterator[None]:
    """More of them and fewer by turns."""
    ended = threading.Event()

    def one(place: int) -> None:
        while not ended.is_set():
            for piece in client.generate("Once upon a time", ignore_eos=True, max_tokens=200 + 40 * place):
                if ended.is_set():
                    break
                del piece
            time.sleep(place % 5)

    with Client(address) as client, ThreadPoolExecutor(OTHERS) as threads:
        for place in range(OTHERS):
            threads.submit(one, place)
        try:
            yield
        finally:
            ended.set()


if __name__ == "__main__":
    main()
