"""What the gateway's page is made of, and what it makes of a model's words and of the engine's numbers."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from browser import answer, page_in, say
from fake_driver import FakeDriver
from gateways import gateway

import ipc.gateway

if TYPE_CHECKING:
    from playwright.sync_api import Page

FILES = sorted((Path(ipc.gateway.__file__).parent / "page").iterdir())
HOSTILE = """\
<img src=x onerror=alert(1)> <script>alert(2)</script> <svg/onload=alert(3)>
[click](javascript:alert(4)) [data](data:text/html,<script>alert(5)</script>) ![x](https://a.example/x.png)
<https://a.example/"onmouseover="alert(6)> [quote](https://a.example/"onclick="alert(7)) `<b>`

```html
</code></pre><img src=x onerror=alert(8)>
```

| <img src=x onerror=alert(9)> |
|---|
| [x](vbscript:alert(10)) |
"""
LONG = 20_000
BEGUN = [
    "[", "]", "*", "_", "**a ", "*a _b ", "`", "``a`", "![a](", "[a](b", "<", "<http://", "http://", "~~", "\\", ">", "> ",
    "- ", "1. ", "\n- a\n\n", "|", "|a|\n|-|\n", "#", "\n", "```\n", "  - a\n", "a* ", "*a* ", "((", "[]()", "\\`",
]  # fmt: skip
"""Again and again, they are what a parser that goes back would never come to the end of."""


@pytest.fixture
def client(driver: FakeDriver, address: str) -> Iterator[httpx.Client]:
    """Of a gateway to the driver."""
    del driver
    with gateway(address) as client:
        yield client


@pytest.fixture
def page(browser: Any, client: httpx.Client) -> Iterator["Page"]:
    """In front of that gateway."""
    with page_in(browser, str(client.base_url)) as page:
        yield page


class References(HTMLParser):
    """The files that a page asks for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        wanted = named.get("src") if tag == "script" else named.get("href") if tag == "link" else None
        self.found += [wanted] if wanted else []


def test_the_page_is_served_whole(client: httpx.Client) -> None:
    """With every file that it and its modules ask for, as what they are."""
    page = client.get("/")
    wanted = set(References(page.text).found)
    wanted |= {f"page/{name}" for file in FILES for name in re.findall(r'from "\./([\w.]+)"', file.read_text())}
    kinds = {name: client.get(f"/{name}").headers["content-type"].split(";")[0] for name in wanted}

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert wanted == {f"page/{file.name}" for file in FILES} - {"page/index.html"}
    expected = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert kinds == {name: expected[Path(name).suffix] for name in wanted}


def test_it_may_load_and_run_nothing_else(client: httpx.Client) -> None:
    """No other host, no inline script or style, no frame around it, no string that becomes an element."""
    policy = client.get("/").headers["content-security-policy"].split("; ")
    assert policy == [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_another_host(file: Path) -> None:
    """The names of XML's namespaces are no addresses to go to."""
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w-]+\.\w+", text) == []


def test_hostile_words_stay_words(page: "Page", driver: FakeDriver) -> None:
    """Nothing that a model writes is run or loaded, and no link leads anywhere but to the web."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    say(page, "hold still")
    request = driver.take()
    for place in range(0, len(HOSTILE), 7):
        driver.say(request, HOSTILE[place : place + 7], [1])
    driver.finish(request, num_tokens=1)
    answer(page).locator(".numbers:not(:empty)").wait_for()

    words = answer(page).locator(".prose").last
    assert words.locator("img, script, svg, iframe, style").count() == 0
    assert (
        words.evaluate("it => [...it.querySelectorAll('*')].flatMap(n => n.getAttributeNames())").count("onerror") == 0
    )
    links = words.locator("a").evaluate_all("found => found.map(link => link.protocol)")
    assert links and set(links) == {"https:"}
    assert "<script>alert(2)</script>" in words.inner_text()
    assert "[click](javascript:alert(4))" in words.inner_text()
    assert [url for url in asked if "example" in url] == []


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("**a** *b* _c_ ~~d~~ `e`", "<p><strong>a</strong> <em>b</em> <em>c</em> <s>d</s> <code>e</code></p>"),
        ("***a*** **b *c* d**", "<p><em><strong>a</strong></em> <strong>b <em>c</em> d</strong></p>"),
        ("snake_case_name 2 * 3 * 4 \\*a\\* **open", "<p>snake_case_name 2 * 3 * 4 *a* **open</p>"),
        ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
        ("# A\n### B #", "<h3>A</h3><h4>B</h4>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("3. a\n4. b\n\ntext", '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>'),
        ("1. a\n\n   b\n2. c", "<ol><li>a<p>b</p></li><li>c</li></ol>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("---", "<hr>"),
        ("In 1999. It was", "<p>In 1999. It was</p>"),
        ("`` a`b ``", "<p><code>a`b</code></p>"),
    ],
)
def test_markdown(content: "Page", markdown: str, html: str) -> None:
    """As CommonMark has it, but that a line's end is one."""
    assert content.evaluate("rendered", markdown) == html


def test_links_lead_to_the_web_alone(content: "Page") -> None:
    """In a tab of their own, which does not know where it came from; a picture is a link to it."""
    shown = content.evaluate("rendered", "[a](https://a.example) http://b.example/c_d. ![e](https://f.example/g.png)")
    assert re.findall(r'href="([^"]*)"', shown) == [
        "https://a.example/",
        "http://b.example/c_d",
        "https://f.example/g.png",
    ]
    assert shown.count('target="_blank" rel="noopener noreferrer nofollow"') == 3


def test_tables_and_code(content: "Page") -> None:
    """With their alignment, and with the text as it was; code that is still being written is code already."""
    table = content.evaluate("rendered", "| a | b |\n|:-|-:|\n| 1 | `x\\|y` |\n| 2 |")
    assert '<tbody><tr><td class="start">1</td><td class="end"><code>x|y</code></td></tr>' in table
    assert '<tr><td class="start">2</td><td class="end"></td></tr>' in table
    code = content.evaluate("rendered", '```py\nif x:  # "why"\n    y = "*a*"')
    assert '<span class="code-comment"># "why"</span>' in code
    assert re.sub("<[^>]+>", "", code).endswith('if x:  # "why"\n    y = "*a*"')


@pytest.mark.parametrize("begun", BEGUN)
def test_no_text_takes_forever(content: "Page", begun: str) -> None:
    """However it repeats itself, all of its characters that mean nothing are shown."""
    assert isinstance(content.evaluate("rendered", begun * (LONG // len(begun))), str)


def test_a_growing_text_ends_as_the_whole(content: "Page") -> None:
    """Blocks that are kept while it streams are those that it would have had at once."""
    text = HOSTILE + "\n1. a\n\n   b\n2. c\n\n> d\n\nend *of* it"
    assert content.evaluate("grown", text) == content.evaluate("rendered", text)


@pytest.fixture(scope="module")
def content(browser: Any) -> Iterator["Page"]:
    """The modules by themselves, without a gateway: ``rendered`` and ``grown`` give the HTML of a text."""
    script = """async () => {
        const { Rendering } = await import("/rendering.js");
        const show = (texts) => {
            const into = document.createElement("div");
            const rendering = new Rendering(into);
            for (const text of texts) rendering.show(text);
            return into.innerHTML;
        };
        window.rendered = (text) => show([text]);
        window.grown = (text) => show([...text].map((_, end) => text.slice(0, end + 1)));
    }"""
    files = {file.name: file for file in FILES}
    page = browser.new_page()
    page.route("http://page.test/**", lambda route: route.fulfill(path=files[route.request.url.rsplit("/", 1)[1]]))
    page.route("http://page.test/", lambda route: route.fulfill(body="", content_type="text/html"))
    page.goto("http://page.test/")
    page.evaluate(script)
    yield page
    page.close()
