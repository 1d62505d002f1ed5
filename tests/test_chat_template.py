"""A chat template is a program whose input the client chooses: it runs under a budget."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import build_byte_level, write_tokenizer
from transformers import AutoTokenizer

from driver.errors import InvalidRequest
from driver.text.content_parts import in_parts
from driver.text.conversation import checked_chat
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.errors import ConfigurationError

QUADRATIC = (
    "{% set ns = namespace(same=0) %}{% for a in messages %}{% for b in messages %}"
    "{% if a.content == b.content %}{% set ns.same = ns.same + 1 %}{% endif %}{% endfor %}{% endfor %}{{ ns.same }}"
)
SILENT = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
HUGE = "{% for number in range(1000) %}{{ messages[0].content }}{% endfor %}"
HUGE_INSIDE = "{% set text %}" + HUGE + "{% endset %}{{ text | length }}"
ENDLESS = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
DIVIDING = "{{ 1 // (messages | length - 1) }}"
CALLING = "{{ messages[0].content.nonsense() }}"


def build_tokenizer(directory: Path, template: str) -> HuggingFaceTokenizer:
    """One with this template."""
    return HuggingFaceTokenizer(write_tokenizer(directory, build_byte_level(), template))


def user(content: str) -> dict[str, Any]:
    """What a user says."""
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("template", "messages", "complaint"),
    [
        (QUADRATIC, [user("x")] * 4096, "takes more than 1 s of a processor for these messages"),
        (SILENT, [user("x")], "takes more than 1 s of a processor for these messages"),
        (HUGE, [user("x" * 10_000)], "makes more than 8388608 characters of these messages"),
        (HUGE_INSIDE, [user("x" * 10_000)], "makes more than 8388608 characters of these messages"),
        (ENDLESS, [user("x")], "refuses these messages: maximum recursion depth exceeded"),
        (DIVIDING, [user("x")], "refuses these messages: integer division or modulo by zero"),
        (CALLING, [user("x")], "refuses these messages: 'str object' has no attribute 'nonsense'"),
    ],
    ids=["slow", "slow without a word", "long", "long in a variable", "endless", "wrong", "wrong in words"],
)
def test_a_template_comes_to_its_end(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], complaint: str
) -> None:
    """By itself, or at the end of its budget; it is the request that hears of it, and the next one is rendered."""
    tokenizer = build_tokenizer(tmp_path, template + "{% if quick is defined %}{% endif %}")

    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.render(checked_chat(messages))

    assert complaint in str(refusal.value) and len(str(refusal.value)) <= 500


def test_a_budget_is_one_rendering_s(tmp_path: Path) -> None:
    """Many renderings, on several threads at once, have each their own, and what transformers renders itself has none."""
    tokenizer = build_tokenizer(tmp_path, HUGE.replace("1000", "100"))
    chats = [checked_chat([user(letter * 60_000)]) for letter in "abcdefgh"]

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(tokenizer.render, chats))

    assert [text[:1] for text in texts] == list("abcdefgh") and {len(text) for text in texts} == {6_000_000}
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([user("x" * 100_000)], tokenize=False)
    assert len(theirs) == 10_000_000


PARTS = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (PARTS, ["system", "user", "assistant"]),
        ("{{ message.content[0].text }}", ["system", "user", "assistant"]),
        ("{{ bos_token + message.content[0]['text'] }}", ["system", "user", "assistant"]),
        (
            "{% if message.role == 'system' %}{{ message.content }}{% else %}" + PARTS + "{% endif %}",
            ["user", "assistant"],
        ),
        ("{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}", []),
        ("{{ message.content | trim }}", []),
        ("{% if message.role == 'user' %}{{ raise_exception('no users') }}{% endif %}", []),
    ],
)
def test_a_role_whose_text_is_written_from_parts_alone_has_them(content: str, told: list[str]) -> None:
    """As models for images have it, whose text was left out without a word."""
    template = "{% for message in messages %}{{ message.role }}:" + content + "{% endfor %}"
    messages = [{"role": role, "content": "text"} for role in ("system", "user", "assistant")]

    written = in_parts(template, messages)

    assert [message["role"] for message in written if isinstance(message["content"], list)] == told
    assert all(message["content"] in ("text", [{"type": "text", "text": "text"}]) for message in written)


def test_a_conversation_in_parts_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """A system message of two, a developer's, and the beginning of an answer that goes on."""
    template = "{% for message in messages %}<{{ message.role }}>" + PARTS + "{% endfor %}"
    tokenizer = build_tokenizer(tmp_path, template)
    said = [("system", "Be brief."), ("developer", "Be kind."), ("user", "Hello"), ("assistant", "Good mor")]
    chat = checked_chat(
        [{"role": role, "content": text} for role, text in said],
        template_kwargs={"continue_final_message": True, "add_generation_prompt": False},
    )

    assert tokenizer.render(chat) == "<system>Be brief.\n\nBe kind.<user>Hello<assistant>Good mor"


@pytest.mark.parametrize(
    "written", ["'\"add\": ' + call.function.arguments", "'\"add\": ' ~ (call.function.arguments | tojson)"]
)
def test_arguments_are_text_where_a_template_takes_no_object(tmp_path: Path, written: str) -> None:
    """As DeepSeek's and Apertus's do, which add them to a text; others are given the object."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ "
        + written
        + " }}{% endfor %}{% endfor %}"
    )
    arguments = '{"city": "Zürich", "days": [1, 2]}'
    call = {"function": {"name": "add", "arguments": arguments}}
    messages = [user("Hi."), {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert build_tokenizer(tmp_path, template).render(checked_chat(messages)) == f'Hi."add": {arguments}'
    with pytest.raises(InvalidRequest, match="refuses these messages: can only concatenate"):
        build_tokenizer(tmp_path, "{{ '' + messages }}{{ messages.tool_calls }}").render(checked_chat(messages))


def test_a_template_of_a_file_takes_the_place_of_the_models(tmp_path: Path) -> None:
    """Whatever the tokenizer's files have; it is what the tokenizer is said to have."""
    directory, path = write_tokenizer(tmp_path, build_byte_level()), tmp_path / "mine.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")

    tokenizer = HuggingFaceTokenizer(directory, path)

    assert tokenizer.render(checked_chat([user("a"), user("b")])) == "[a][b]"
    assert tokenizer.info()["chat_template"] == path.read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "mine.jinja cannot be read"), (b"\xff", "cannot be read"), (b"\n{% for %}", "is wrong in line 2: ")],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """At the start, with the line."""
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=reason):
        HuggingFaceTokenizer(write_tokenizer(tmp_path / "model", build_byte_level()), path)
