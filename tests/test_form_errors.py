"""What is wrong with the form of an answer, as each client wrote it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_driver import FakeDriver, serving
from gateways import CHAT, TEXT, chat, events, gateway
from test_batch import Files
from tokenizer_files import TOOL_TEMPLATE, build_byte_level

from driver.grammars.compiler import TOO_HARD_TO_COMPILE, GrammarCompiler, refused
from driver.grammars.matcher import Grammar, GrammarError, MaskedTokenizer
from driver.grammars.matcher_pool import TOO_HARD
from driver.grammars.protocol import TokenizerDefinition
from driver.request import ActiveRequest, RequestError, ReturnSample
from driver.request_parameters import sampling_params
from ipc.commands.cli import main

RESPONSES = "/v1/responses"
SLOW = "slow"
"""In a grammar that no process compiles in its time."""


class CompilingDriver(FakeDriver):
    """Compiles the grammars of all requests; its model calls functions, and may think before that."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.tokenizer_info = {"chat_template": template}
        tokenizer = build_byte_level()
        definition = TokenizerDefinition(tokenizer.to_str(), tokenizer.get_vocab_size(), (0,))
        self._tokenizer = MaskedTokenizer(definition)

    def submit_request(self, request: ActiveRequest) -> None:
        super().submit_request(request)
        params = sampling_params(request.params, {}).structured_outputs
        if params is None:
            return
        job = GrammarCompiler.job(params)
        try:
            Grammar(self._tokenizer, job)
        except GrammarError as error:
            raise refused(params, error) from error
        if SLOW.encode() in job:
            raise refused(params, TOO_HARD_TO_COMPILE)


@pytest.fixture(scope="module", params=["thinks", "does not think"])
def driver(request: pytest.FixtureRequest) -> CompilingDriver:
    """One for all: it keeps nothing. Behind thoughts a form becomes a part of a grammar of the gateway's."""
    template = TOOL_TEMPLATE if request.param == "thinks" else TOOL_TEMPLATE.replace("think>", "-")
    return CompilingDriver(template)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, driver: CompilingDriver) -> Iterator[str]:
    """Where the driver is served."""
    address = f"ipc://{tmp_path_factory.mktemp('compiling')}/o.sock"
    with serving(address, driver):
        yield address


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    """A client of a gateway."""
    with gateway(address) as client:
        yield client


WRONG, ENDLESS = {"type": "text"}, {"type": "object", "properties": {SLOW: {"type": "integer"}}}
FINE = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema(given: dict[str, Any]) -> dict[str, Any]:
    """A chat's form."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}}


def tags(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM's structural tags."""
    structures = [{"begin": "<f>", "schema": given, "end": "</f>"}]
    return {"response_format": {"type": "structural_tag", "structures": structures, "triggers": ["<"]}}


def tools(*schemas: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    """A chat's, of which one must be called, or none need be."""
    functions = [{"name": f"f{number}", "parameters": given} for number, given in enumerate(schemas)]
    given = [
        {"type": "function", "function": function | ({"strict": True} if strict else {})} for function in functions
    ]
    return {"tools": given} | ({} if strict else {"tool_choice": "required"})


def named(name: str) -> dict[str, Any]:
    """A choice of one of them."""
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


SCHEMA, FORMAT = "response_format.json_schema.schema", {"type": "json_schema", "name": "n"}
SECOND, TOOL = "tools[1].function.parameters", {"type": "function", "name": "f"}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, schema(WRONG), SCHEMA, "Invalid type: text"),
    (CHAT, schema({}), SCHEMA, "must be more than nothing"),
    (CHAT, schema(ENDLESS), SCHEMA, "cannot be compiled within"),
    (CHAT, schema({"type": "string", "const": "x" * 70000}), SCHEMA, "65536"),
    (CHAT, tags(WRONG), "response_format.structures", "Invalid type: text"),
    (CHAT, {"guided_json": "{"}, "guided_json", "this is no JSON"),
    (CHAT, {"guided_json": WRONG}, "guided_json", "Invalid type: text"),
    (CHAT, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    (CHAT, {"guided_choice": []}, "guided_choice", "must be from 1 to"),
    (CHAT, {"guided_grammar": "start: unheard"}, "guided_grammar", 'unknown name: "unheard"'),
    (CHAT, {"structured_outputs": {"json": WRONG}}, "structured_outputs.json", "Invalid type: text"),
    (CHAT, tools(WRONG), "tools[0].function.parameters", "Invalid type: text"),
    (CHAT, tools(FINE, WRONG, FINE), SECOND, "Invalid type: text"),
    (CHAT, tools(FINE, WRONG) | named("f1"), SECOND, "Invalid type: text"),
    (CHAT, tools(FINE, ENDLESS) | named("f1"), SECOND, "cannot be compiled within"),
    (CHAT, tools(FINE, ENDLESS), "tools", "cannot be compiled within"),
    (CHAT, tools(FINE, WRONG, strict=True) | schema(FINE), SECOND, "Invalid type: text"),
    (CHAT, tools(FINE, FINE, strict=True) | schema(WRONG), SCHEMA, "Invalid type: text"),
    (CHAT, tools(FINE, FINE, strict=True) | schema(ENDLESS), "tools", f"tools and {SCHEMA}: it cannot be compiled"),
    (TEXT, schema(WRONG), SCHEMA, "Invalid type: text"),
    (TEXT, schema({"const": 2**70}), SCHEMA, f"{SCHEMA}.const: a number is too large"),
    (TEXT, tags(WRONG), "response_format.structures", "Invalid type: text"),
    (TEXT, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    (RESPONSES, {"text": {"format": {**FORMAT, "schema": WRONG}}}, "text.format.schema", "Invalid type: text"),
    (RESPONSES, {"text": {"format": {**FORMAT, "schema": ENDLESS}}}, "text.format.schema", "cannot be compiled"),
    (
        RESPONSES,
        {"tools": [{**TOOL, "parameters": WRONG, "strict": True}]},
        "tools[0].parameters",
        "Invalid type: text",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), CASES)
def test_an_error_names_the_field_of_the_body(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    """Whoever finds it, and whatever grammar the field has become a part of: nothing of that is told."""
    asked = {"prompt": "x"} if path == TEXT else {"input": "x"} if path == RESPONSES else chat("x")

    answer = http.post(path, content=json.dumps(asked | fields))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_request")
    assert error["message"].startswith(param) and words in error["message"]
    assert "said" not in error["message"] and "arguments_" not in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_in_the_middle_of_a_stream_names_it_too(
    http: httpx.Client, driver: CompilingDriver, path: str
) -> None:
    """As where it takes too long to tell what may come next."""
    asked = {"prompt": "hold"} if path == TEXT else chat("hold")

    def fail() -> None:
        request = driver.take()
        driver.say(request, '{"', [1])
        error = RequestError("invalid_request", f"structured_outputs: {TOO_HARD}")
        request.channel.put(ReturnSample(request_id=request.request_id, error=error))

    with ThreadPoolExecutor(1) as pool:  # an answer begins with its first token, or after some seconds
        failed = pool.submit(fail)
        with http.stream("POST", path, json={**asked, **schema(FINE), "stream": True}) as response:
            *_, last = events(response)
    failed.result()

    assert last["error"]["message"] == f"{SCHEMA}: {TOO_HARD}" and last["error"]["param"] == SCHEMA


def test_an_error_of_a_batch_names_it_too(tmp_path: Path, address: str) -> None:
    """In a line of OpenAI's; a plain line has our own names."""
    files, body = Files(tmp_path, address), chat("x", **schema(WRONG))
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    files.write(line, {"prompt": "x", "structured_outputs": {"json": WRONG}, "custom_id": "b"})

    assert main(files.command) == 1

    theirs, ours = (files.results()[name]["body"]["error"] for name in "ab")
    assert theirs["param"] == SCHEMA and theirs["message"].startswith(f"{SCHEMA}: ")
    assert ours["param"] == "structured_outputs" and ours["message"].startswith("structured_outputs.json: ")
