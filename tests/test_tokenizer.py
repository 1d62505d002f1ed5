"""Text to ids by the files of a model directory, and refusals that say what is wrong with them."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tokenizer_files import CHAT_TEMPLATE, TOOL_TEMPLATE, build_byte_level, write_tokenizer
from transformers import AutoTokenizer

from driver.errors import InvalidRequest
from driver.request import TokenizerRequest
from driver.text.conversation import checked_chat
from driver.text.tokenizer import HuggingFaceTokenizer, prompt_token_ids
from engine.errors import ConfigurationError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer and a chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"), build_byte_level())


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> HuggingFaceTokenizer:
    """The tokenizer of that directory."""
    return HuggingFaceTokenizer(directory)


def message(role: Any = "user", content: Any = "hi") -> dict[str, Any]:
    """A good message, unless said otherwise."""
    return {"role": role, "content": content}


def calling(calls: list[Any]) -> dict[str, Any]:
    """What an assistant says that calls tools."""
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_text_survives_the_way_there_and_back(tokenizer: HuggingFaceTokenizer) -> None:
    """Decoding what encoding gave is the text, spaces before punctuation included."""
    text = " The fox , the 'fox' n't  😀\n"

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_no_text(tokenizer: HuggingFaceTokenizer) -> None:
    """Special ids and ids that the vocabulary lacks are invisible, and decode to nothing."""
    end = tokenizer.encode("<|end|>")
    assert len(end) == 1

    assert tokenizer.decode([*end, *tokenizer.encode("fox"), *end]) == "fox"
    assert not tokenizer.is_visible(end[0]) and not tokenizer.is_visible(100_000)
    assert tokenizer.is_visible(tokenizer.encode("f")[0])


def test_a_chat_goes_through_the_template(tokenizer: HuggingFaceTokenizer) -> None:
    """A conversation is the rendered template, up to where the assistant speaks."""
    chat = checked_chat([message("user", "hi"), message("assistant", "ho"), message("user", "?")])

    assert tokenizer.render(chat) == "<|user|>hi<|end|><|assistant|>ho<|end|><|user|>?<|end|><|assistant|>"


def test_a_chat_may_end_otherwise(tokenizer: HuggingFaceTokenizer) -> None:
    """With the last message itself, or in the middle of it; and the template is there to be read."""
    messages = [message("user", "hi"), message("assistant", "ho")]
    chat, open_end = "<|user|>hi<|end|><|assistant|>ho<|end|>", "<|user|>hi<|end|><|assistant|>ho"

    for switches, text in (({}, chat), ({"continue_final_message": True}, open_end)):
        checked = checked_chat(messages, template_kwargs={"add_generation_prompt": False, **switches})
        assert tokenizer.render(checked) == text
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        tokenizer.render(checked_chat(messages, template_kwargs={"continue_final_message": True}))
    assert tokenizer.info()["chat_template"] == CHAT_TEMPLATE


def test_a_tokenizer_tells_its_special_tokens(tokenizer: HuggingFaceTokenizer) -> None:
    """All that a text is without unless it is asked for, each once."""
    info = tokenizer.info()
    told = [info[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if name in info]
    special = [
        token
        for token_id in range(1000)
        if tokenizer.is_special(token_id)
        for token in [tokenizer.decode([token_id], skip_special_tokens=False)]
    ]

    assert sorted({*told, *info["additional_special_tokens"]}) == sorted(special)
    assert set(told).isdisjoint(info["additional_special_tokens"])


@pytest.mark.parametrize("text", ["😀", "今日は Zoë", "naïve"])
def test_the_bytes_of_half_characters_are_known(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    """Put together they are the text, where a token by itself is none."""
    token_ids = tokenizer.encode_word(text)
    pieces = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    spelt = [
        tokenizer.bytes_of(token_id) if "\ufffd" in piece else piece.encode()
        for token_id, piece in zip(token_ids, pieces, strict=True)
    ]

    assert None not in spelt and b"".join(one or b"" for one in spelt).decode().split() == text.split()


def test_developers_speak_as_the_system(tokenizer: HuggingFaceTokenizer) -> None:
    """To a template that has no such role; what stands together is one message, as many templates take no more."""
    chat = [message("developer", "a"), message("system", "b"), message("developer", "c"), message("user", "d")]
    later = [message("user", "d"), message("developer", "e")]

    assert tokenizer.render(checked_chat(chat)) == "<|system|>a\n\nb\n\nc<|end|><|user|>d<|end|><|assistant|>"
    assert tokenizer.render(checked_chat(later)) == "<|user|>d<|end|><|system|>e<|end|><|assistant|>"
    assert [one["role"] for one in chat] == ["developer", "system", "developer", "user"]


def test_a_template_that_knows_developers_hears_of_them(tmp_path: Path) -> None:
    """By their own role."""
    template = CHAT_TEMPLATE + "{% if messages[0].role == 'developer' %}!{% endif %}"
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), template))

    assert tokenizer.render(checked_chat([message("developer", "a")])) == "<|developer|>a<|end|><|assistant|>!"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], "messages[0] must have role and content"),
        ([message(), {"role": "user"}], "messages[1] must have role and content"),
        ([message() | {"tool_calls": []}], "a message of role user has no 'tool_calls'"),
        ([message("assistant") | {"audio": None}], "messages[0]: a message of role assistant has no 'audio'"),
        ([message(role="boss")], "role must be one of system"),
        ([message(role=["user"])], "role must be one of system"),
        ([message(content=None)], "content must be a string, not NoneType"),
        ([message("assistant") | {"reasoning_content": 1}], "reasoning_content must be a string, not int"),
        ([message(content=[{"type": "text"}])], "content must be a string, not list"),
        ([message(content="\ud83d")], "surrogate"),
        ([calling(["f"])], "messages[0].tool_calls[0] must have a function"),
        ([calling([{"function": {"name": "f", "arguments": "\ud83d"}}])], "tool_calls[0] holds half a surrogate pair"),
        ([calling([{"function": {"name": "f", "arguments": "[" * 65}}])], "its arguments cannot be read: it is nested"),
        ([calling([{"function": {"name": "f", "arguments": []}}])], "must be a JSON object, not list"),
        ([message(role="tool")], "refuses these messages: no tools here"),
        ([calling([{"function": {"name": "f"}}])], "knows no tool_calls"),
    ],
)
def test_bad_messages_are_the_clients(tokenizer: HuggingFaceTokenizer, messages: Any, complaint: str) -> None:
    """Messages that are none, or that the template refuses or would not show, are refused by name."""
    with pytest.raises(InvalidRequest) as error:
        tokenizer.render(checked_chat(messages))

    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("tools", "template_kwargs", "complaint"),
    [
        ([{"type": "function", "function": {"name": "f"}}], {}, "the chat template of this model knows no tools"),
        ([{"type": "search"}], {}, "tools[0] must be of type function"),
        ([], {"enable_thinking": False}, "the chat template of this model has no 'enable_thinking'"),
        ([], {"messages": []}, "has no 'messages'"),
        ([], {"tokenize": False}, "has no 'tokenize'"),
    ],
)
def test_what_the_template_would_ignore_is_refused(
    tokenizer: HuggingFaceTokenizer, tools: Any, template_kwargs: dict[str, Any], complaint: str
) -> None:
    """Tools and switches that a template has no word of, and what is not its own to be told."""
    with pytest.raises(InvalidRequest) as error:
        tokenizer.render(checked_chat([message()], tools, template_kwargs))

    assert complaint in str(error.value)


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[]", "Oslo", '{"a": 1}'])
def test_arguments_that_a_model_got_wrong_go_back_as_they_are(tmp_path: Path, arguments: str) -> None:
    """A call that was cut off is a turn of the conversation too; what is an object is one for the template."""
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), template))

    text = tokenizer.render(checked_chat([calling([{"function": {"name": "f", "arguments": arguments}}])]))

    assert text == ("{'a': 1}" if arguments == '{"a": 1}' else arguments)


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    """Functions, what was called of them and what came of it, and the template's own switches."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), TOOL_TEMPLATE))
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [message(), calling([call]), message("tool", "7") | {"tool_call_id": "1"}]

    text = tokenizer.render(checked_chat(messages, tools, {"enable_thinking": False}))

    rendered = 'add<|user|>hi<|end|><|assistant|><tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    rendered += "</tool_call><|end|><|tool|>7<|end|><|assistant|><think>\n\n</think>\n\n"
    assert text == rendered


def test_a_template_gets_a_call_in_the_order_of_the_client(tmp_path: Path) -> None:
    """Some write the whole of it. A type that is left out comes last."""
    template = "{% for call in messages[0].tool_calls %}{{ call | tojson }}{% endfor %}"
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), template))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": 2}}}
    untyped = {"id": "2", "function": {"arguments": {}, "name": "add"}}

    text = tokenizer.render(checked_chat([calling([call, untyped])]))

    assert text == json.dumps(call) + json.dumps(untyped | {"type": "function"})


def test_a_template_of_tools_is_taken_for_tools(tmp_path: Path) -> None:
    """Of several, by their names, whether they are in a list or in files of their own."""
    directory = write_tokenizer(tmp_path, build_byte_level(), None)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    named = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    listed: Any = write_tokenizer(tmp_path / "listed", build_byte_level(), named)  # type: ignore[arg-type]
    tools = [{"type": "function", "function": {"name": "add"}}]

    for tokenizer in map(HuggingFaceTokenizer, (directory, listed)):
        assert tokenizer.render(checked_chat([message()])) == "<|user|>hi<|end|><|assistant|>"
        assert tokenizer.render(checked_chat([message()], tools)) == "add<|user|>hi<|end|><|assistant|>"


def test_templates_may_use_what_transformers_gives_them(tmp_path: Path) -> None:
    """The date, JSON as it is, blocks for training, loop controls, and tools by SmolLM3's name."""
    template = (
        "{% set today = strftime_now('%Y') %}{{ today | length }}"
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}{% endfor %}"
        "{% if xml_tools %}{{ xml_tools[0].function.name }}{% endif %}{{ messages[1].thinking }}"
    )
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), template))
    messages = [message(), message("assistant") | {"reasoning_content": "Hm."}]

    assert (
        tokenizer.render(checked_chat(messages, [{"type": "function", "function": {"name": "f"}}]))
        == '4{"a": "<é>"}fHm.'
    )


def test_half_a_surrogate_pair_is_the_clients(tokenizer: HuggingFaceTokenizer) -> None:
    """A prompt that no UTF-8 can carry is refused, with the place."""
    request = TokenizerRequest(request_id="one", channel=SimpleQueue(), prompt="ab\ud83d")
    with pytest.raises(InvalidRequest, match="character 2"):
        prompt_token_ids(request, tokenizer.encode, tokenizer, 9)


def test_a_model_without_chat_template_refuses_messages(tmp_path: Path) -> None:
    """Without a chat template, messages are refused with a word on what to send instead."""
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, build_byte_level(), chat_template=None))

    with pytest.raises(InvalidRequest, match="no chat template: send a prompt"):
        tokenizer.render(checked_chat([message()]))


def test_a_model_for_images_may_have_its_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Which counts where the tokenizer has none."""
    directory = write_tokenizer(tmp_path, build_byte_level(), chat_template=None)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))

    assert HuggingFaceTokenizer(directory).info()["chat_template"] == CHAT_TEMPLATE
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    assert HuggingFaceTokenizer(directory).info()["chat_template"] == TOOL_TEMPLATE
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text('{"chat_template": 7}')
    with pytest.raises(ConfigurationError, match=r"chat_template\.json: Expected `str \| null`"):
        HuggingFaceTokenizer(directory)


def test_a_directory_without_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    """A directory that holds no tokenizer.json is named, and so is the file."""
    with pytest.raises(ConfigurationError, match=f"{tmp_path} has no tokenizer.json"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    """A tokenizer.json that cannot be read is a ConfigurationError that names the directory."""
    write_tokenizer(tmp_path, build_byte_level())
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigurationError, match="cannot be read"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("template", [7, {"default": 7}])
def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path, template: Any) -> None:
    """When the model is loaded, unless the operator gives another."""
    directory = write_tokenizer(tmp_path, build_byte_level(), chat_template=template)
    (tmp_path / "mine.jinja").write_text(CHAT_TEMPLATE)

    with pytest.raises(ConfigurationError, match="chat_template that is no text"):
        HuggingFaceTokenizer(directory)
    assert HuggingFaceTokenizer(directory, tmp_path / "mine.jinja").info()["chat_template"] == CHAT_TEMPLATE


def test_loading_prints_nothing(directory: Path) -> None:
    """A daemon that needs no PyTorch is not told that it is missing."""
    code = (
        f"from pathlib import Path; from driver.text.tokenizer import *; HuggingFaceTokenizer(Path({str(directory)!r}))"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout + run.stderr == ""


def test_a_long_text_leaves_the_interpreter_to_others(tokenizer: HuggingFaceTokenizer) -> None:
    """Other threads go on while it is encoded, and while its token ids are decoded."""
    text, turns, ended = "fox " * 200_000, [], threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            turns.append(1)

    counting = threading.Thread(target=count)
    counting.start()
    token_ids = tokenizer.encode(text)
    while_encoding = len(turns)
    decoded = tokenizer.decode(token_ids)
    ended.set()
    counting.join()

    assert decoded == text and while_encoding > 10


def test_encoding_is_transformers_own(tokenizer: HuggingFaceTokenizer, directory: Path) -> None:
    """Special tokens in the text and around it included, and whatever truncation or padding the files ask for."""
    theirs = AutoTokenizer.from_pretrained(directory)

    for text in ("", "the fox", "<|user|>hi<|end|>", " \n\tx", "今日は<|end|>", "😀" * 50):
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.encode_word(text) == theirs.encode(text, add_special_tokens=False)
