"""What is wrong with a field, by the name that the client wrote."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_driver import FakeDriver, serving
from gateways import CHAT, TEXT, chat, gateway

from driver.errors import ContextLengthExceeded, InvalidRequest
from driver.request import ActiveRequest, TokenizerRequest
from driver.request_parameters import sampling_params
from driver.text.conversation import checked_chat
from driver.text.tokenizer import check_in_vocabulary

RESPONSES = "/v1/responses"
ROOM = 100
NOTHING: list[Any] = []


class CheckingDriver(FakeDriver):
    """Refuses what the first stage does."""

    def submit_request(self, request: ActiveRequest) -> None:
        """Raises InvalidRequest."""
        params = sampling_params(request.params, {})
        if request.messages is not None:
            checked_chat(request.messages)
        if (params.max_tokens or 0) > ROOM:
            raise ContextLengthExceeded(ROOM, f"max_tokens is {params.max_tokens}", "ask for less")
        if params.prompt_logprobs is not None:
            raise InvalidRequest(f"prompt_logprobs: {params.prompt_logprobs} for each are too many")
        super().submit_request(request)

    def submit_tokenizer_request(self, request: TokenizerRequest) -> None:
        """Raises InvalidRequest."""
        check_in_vocabulary("token_ids", request.token_ids or [], ROOM)
        super().submit_tokenizer_request(request)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a gateway."""
    address = f"ipc://{tmp_path_factory.mktemp('checking')}/o.sock"
    with serving(address, CheckingDriver()), gateway(address) as client:
        yield client


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (RESPONSES, {"input": "x", "max_output_tokens": 101}, "input", "max_output_tokens is 101"),
    (RESPONSES, {"input": "x", "max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_output_tokens (2)"),
    (RESPONSES, {"input": NOTHING}, "input", "input must be a list"),
    (CHAT, chat("x", max_completion_tokens=101), "messages", "max_completion_tokens is 101"),
    (CHAT, chat("x", max_tokens=101), "messages", "but max_tokens is 101"),
    (CHAT, chat("x", max_tokens=101, max_completion_tokens=101), "messages", "but max_tokens is 101"),
    (CHAT, chat("x", max_completion_tokens=2, min_tokens=3), "min_tokens", "at most max_completion_tokens (2)"),
    (CHAT, chat("x", max_completion_tokens=2, stop=["max_tokens " * 30]), "stop", "not 'max_tokens max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 101}, "prompt", "but max_tokens is 101"),
    (TEXT, {"prompt": "x", "echo": True, "logprobs": 5}, "logprobs", "logprobs: 5 for each"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 5}, "prompt_logprobs", "prompt_logprobs: 5 for each"),
    ("/detokenize", {"tokens": [1, 101]}, "tokens", "tokens[1] must be a token id"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "words"), CASES)
def test_an_error_of_the_daemon_names_the_field_of_the_body(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    """And quotes what the client wrote as it is."""
    error = http.post(path, json=body | ({"stream": stream} if path.startswith("/v1") else {})).json()["error"]

    assert error["param"] == param
    assert words in error["message"]


def test_the_place_in_a_conversation_is_left_out_where_the_body_counts_otherwise(http: httpx.Client) -> None:
    """Items that stand together are one turn of the daemon's."""
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}

    error = http.post(RESPONSES, json={"instructions": "x", "input": [call] * 600}).json()["error"]

    assert error["message"] == "input: tool_calls may be 512, not 600"
    assert error["param"] == "input"
