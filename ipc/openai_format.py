"""Requests and answers as OpenAI's API has them, and as ours has them."""

from typing import Any, NamedTuple

import msgspec

from engine.sampling_params import SamplingParams
from ipc.completion import Choice, Completion, TokenLogprobs
from ipc.messages import Logprob

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEFAULT_MAX_TOKENS = 16
"""Of a text's completion, where the body does not say."""
UNUSED = {"stream": False, "echo": False, "best_of": 1, "store": False}
"""Parameters of theirs that ours has not, with the values that ask for nothing."""
UNREAD = ("model", "user", "metadata")


class BodyError(Exception):
    """A body that asks for what is not served here; ``status`` and ``code`` are what OpenAI's servers would say."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Question(NamedTuple):
    """What to ask our client: a prompt or messages, and SamplingParams by name."""

    prompt: Any
    messages: Any
    params: dict[str, Any]


def question_of(url: str, body: dict[str, Any], model: str) -> Question:
    """The body of a request to one of their addresses, for the model that is served; raises BodyError.

    Beside their parameters it may have ours. What neither knows is an error.
    """
    if url not in (CHAT, TEXT):
        raise BodyError(f"url must be {CHAT} or {TEXT}, not {url!r}")
    if body.get("model") not in (None, model):
        raise BodyError(f"{model} is served here, and not {body['model']!r}", 404, "model_not_found")
    given = {name: value for name, value in body.items() if value is not None and name not in UNREAD}
    given = {name: value for name, value in given.items() if name not in UNUSED or value != UNUSED[name]}
    asked = given.pop("messages" if url == CHAT else "prompt", None)
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    if url == TEXT:
        given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    elif "logprobs" in given or "top_logprobs" in given:
        _take_chat_logprobs(given)
    if "response_format" in given:
        _take_form(given)
    if isinstance(given.get("logit_bias"), dict):
        given["logit_bias"] = {_token_id(key): bias for key, bias in given["logit_bias"].items()}
    return question(None if url == CHAT else asked, asked if url == CHAT else None, given)


def question(prompt: Any, messages: Any, params: dict[str, Any]) -> Question:
    """One of ours; raises BodyError where there is not one of both, or a name that nobody knows."""
    if (prompt is None) == (messages is None):
        raise BodyError("a request has either a prompt or messages: give exactly one of them")
    for name in params:
        if name not in SamplingParams.__struct_fields__:
            raise BodyError(f"unknown parameter {name!r}")
    return Question(prompt, messages, params)


def body_of(completion: Completion, asked: Question, model: str, name: str) -> dict[str, Any]:
    """The answer, less the time when it was made: the same tokens make the same body."""
    prompt, output = completion.usage.prompt_tokens, completion.usage.completion_tokens
    chat = asked.messages is not None
    choices = [_choice(choice, asked) for choice in completion.choices]
    if completion.prompt_logprobs:
        choices[0]["prompt_logprobs"] = msgspec.to_builtins(completion.prompt_logprobs)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def error_body(message: str, code: str) -> dict[str, Any]:
    """An answer that is none."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _choice(choice: Choice, asked: Question) -> dict[str, Any]:
    told: dict[str, Any] = {"index": choice.index}
    logprobs: dict[str, Any] | None = None
    if asked.messages is not None:
        told["message"] = {"role": "assistant", "content": choice.text}
        if choice.logprobs:
            logprobs = {"content": [_chat_logprobs(token, asked.params["logprobs"]) for token in choice.logprobs]}
    else:
        told["text"] = choice.text
        if choice.logprobs:
            logprobs = _text_logprobs(choice.logprobs)
    told |= {"logprobs": logprobs, "finish_reason": choice.finish_reason}
    if asked.params.get("detokenize") is False:
        told["token_ids"] = choice.token_ids
    return told


def _chat_logprobs(token: TokenLogprobs, count: int) -> dict[str, Any]:
    own, *_ = token.values()
    likeliest = [_told(one) for one in token.values() if one.rank <= count]
    return {**_told(own), "top_logprobs": likeliest}


def _told(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": one.logprob, "bytes": list(text.encode())}


def _text_logprobs(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    own = [next(iter(token.values())) for token in tokens]
    texts = [one.decoded_token or "" for one in own]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in own],
        "top_logprobs": [{one.decoded_token or "": one.logprob for one in token.values()} for token in tokens],
        "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
    }


def _take_chat_logprobs(given: dict[str, Any]) -> None:
    """``logprobs`` is whether, and ``top_logprobs`` how many."""
    wanted, count = given.pop("logprobs", False), given.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise BodyError(f"logprobs must be true or false in a chat, not {wanted!r}")
    if count and not wanted:
        raise BodyError("top_logprobs needs logprobs: true")
    if wanted:
        given["logprobs"] = count


def _take_form(given: dict[str, Any]) -> None:
    form = given.pop("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    schema = form.get("json_schema") if isinstance(form, dict) else None
    if kind == "json_object":
        given["structured_outputs"] = {"json_object": True}
    elif kind == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        given["structured_outputs"] = {"json": schema["schema"]}
    elif kind != "text":
        raise BodyError(
            f"response_format must be of type text, json_object or json_schema with its schema, not {form!r}"
        )


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise BodyError(f"logit_bias must be by token id, not by {key!r}") from error
