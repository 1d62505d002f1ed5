"""``/openapi.json``: that it is true."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from fake_driver import FakeDriver
from gateways import CHAT, TEXT, chat, events, gateway

from ipc.gateway.access.callers import Callers
from ipc.gateway.openapi import document
from ipc.openai.request_bodies import ChatCompletionRequest


@pytest.fixture
def http(address: str, driver: FakeDriver, tmp_path: Path) -> Iterator[httpx.Client]:
    """An operator's client of the gateway under test."""
    del driver
    api_keys = tmp_path / "api-keys.toml"
    api_keys.touch(mode=0o600)
    api_keys.write_text('[ops]\napi_key = "sk-ops-0123456789ab"\noperator = true\n')
    with gateway(address, callers=Callers(api_keys)) as client:
        client.headers["Authorization"] = "Bearer sk-ops-0123456789ab"
        yield client


Validator = jsonschema.Draft202012Validator

DOCUMENT = document()
TENSOR = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "object_names": ["x"], "offsets": [0]}


def check(answer: httpx.Response, described: dict[str, Any]) -> None:
    """Raises where status, content type or body are not as described of that operation."""
    content = described["responses"][str(answer.status_code)]["content"]
    schema = content[answer.headers["content-type"].partition(";")[0]]["schema"]
    value = answer.json() if answer.headers["content-type"] == "application/json" else answer.text
    Validator.check_schema(schema)
    Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def test_patterns_are_expressions_of_json_schema() -> None:
    """Which has no anchors but ``^`` and ``$``: Python's others are letters there."""
    text = json.dumps(DOCUMENT)

    assert '"pattern"' in text
    assert not [anchor for anchor in (r"\\A", r"\\Z") if anchor in text]


def test_every_address_is_described_and_answers_as_described(http: httpx.Client) -> None:
    """With what it is for, and with nonsense."""
    described = http.get("/openapi.json").json()
    for schema in described["components"]["schemas"].values():
        Validator.check_schema(schema)
    bodies = {
        CHAT: chat("what is it"),
        TEXT: {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
        "/v1/load_lora_adapter": {"lora_name": "alice"},
        "/v1/unload_lora_adapter": {"lora_name": "alice"},
        "/update_weights": {"update_info": TENSOR},
    }
    for path, methods in described["paths"].items():
        ((method, operation),) = methods.items()
        url = path.replace("{model}", "parrot")
        for body in (bodies.get(path, {}), {"nonsense": True}):
            answer = http.request(method, url, json=body if method == "post" else None)
            check(answer, operation)
            wrong = method == "post" and ("nonsense" in body or path == "/v1/embeddings")
            assert answer.status_code == (400 if wrong else 200)


def test_refusals_of_an_update_of_weights_are_as_described(http: httpx.Client) -> None:
    """Each phase may name a model, which may be another than is served, and the last may have no update."""
    for phase, body in (
        ("start_weight_update", {}),
        ("update_weights", {"update_info": TENSOR}),
        ("finish_weight_update", {}),
    ):
        operation = DOCUMENT["paths"][f"/{phase}"]["post"]
        assert "model" in [one["name"] for one in operation["parameters"]]
        check(http.post(f"/{phase}?model=hen", json=body), operation)
    check(http.post("/finish_weight_update"), operation)


def test_chunks_are_as_described(http: httpx.Client) -> None:
    """Those of a chat and those of a text."""
    components = {"components": DOCUMENT["components"]}
    for path, body, name in ((CHAT, chat("a b"), "ChatChunk"), (TEXT, {"prompt": "a b"}, "TextCompletion")):
        for chunk in events(http.post(path, json={**body, "stream": True})):
            jsonschema.validate(chunk, {"$ref": f"#/components/schemas/{name}", **components})


def test_what_is_described_of_a_body_is_what_is_taken() -> None:
    """Its fields and no others, with their limits."""
    schema = DOCUMENT["components"]["schemas"]["ChatCompletionRequest"]

    assert schema["properties"].keys() == set(ChatCompletionRequest.__struct_fields__)
    assert schema["additionalProperties"] is False and schema["required"] == ["messages"]
    assert schema["properties"]["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
