"""Requests and answers as OpenAI's API has them, and as ours has them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from driver.errors import ContextLengthExceeded, InvalidRequest, NotFound, shortened
from driver.text.json_schema import check_json
from engine.sampling_params import SamplingParams
from ipc.openai.allowed_values import allowed_values, field_names
from ipc.openai.answer_bodies import ErrorAnswer, ErrorDetail, chat_completion, text_completion
from ipc.openai.answer_format import format_of
from ipc.openai.question import BodyError, Question
from ipc.openai.request_bodies import ChatCompletionRequest, CompletionRequest
from ipc.wire.completion import Completion
from ipc.wire.escaping import visible

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: "messages", TEXT: "prompt", "/v1/responses": "input"}
"""The field with the prompt, by address."""
_NAMED = (*SamplingParams.__struct_fields__, "tools", "chat_template_kwargs", "tokens")
"""Fields with which an error about them begins."""
STATUS = {
    "invalid_request": 400,
    ContextLengthExceeded.code: 400,
    "message_too_long": 413,
    "not_found": 404,
    "forbidden": 403,
    "quota_exceeded": 429,
    "overloaded": 503,
    "draining": 503,
    "asleep": 503,
    "stopped": 503,
}
"""HTTP's codes for those of the daemon; any other is 500."""
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's error types by status; others are invalid_request_error or server_error."""

FREE = (
    *("parameters", "schema", "json", "guided_json", "chat_template_kwargs", "arguments"),
    *("logit_bias", "metadata", "client_metadata"),
)
"""Fields in which a null is one."""
EXACT = 2.0**53
"""From here on a float may stand for another whole number."""

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?")
_WRONG = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_JSON = {"True": "true", "False": "false"}
_MEDIA = re.compile("image|audio|video|file")
"""In the types of parts that are no text."""

Body = TypeVar("Body")


def question_of(url: str, body: dict[str, Any], models: Sequence[str] | None) -> Question:
    """The body of a request to one of their addresses that is answered whole; raises BodyError.

    ``models`` are what it may name; with None the daemon says.
    """
    if url not in (CHAT, TEXT):
        raise BodyError(f"url must be {CHAT} or {TEXT}, not {url!r}")
    request = decoded(body, ChatCompletionRequest) if url == CHAT else decoded(body, CompletionRequest)
    if models is not None:
        check_model(request.model or None, models)
    if request.stream:
        raise BodyError("stream must be false, or left out: a batch's answers are whole", "stream")
    if isinstance(request, ChatCompletionRequest):
        if request.tools:
            raise BodyError("tools must be left out: calls are told from text by odriver gateway alone", "tools")
        return request.question()
    questions = request.questions()
    if len(questions) > 1 or request.echo:
        raise BodyError("in a batch there is one prompt a line, and no echo", "prompt")
    return questions[0]


def check_model(asked: str | None, served: Sequence[str]) -> None:
    """Raises BodyError where another model is asked for than is served, by all its names."""
    if asked is not None and asked not in served:
        names = list(dict.fromkeys(served))
        told = f"{' and '.join(names)} {'are' if names[1:] else 'is'} served here, and not {asked!r}"
        raise BodyError(told, "model", 404, "model_not_found")


def question(prompt: Any, messages: Any, params: dict[str, Any]) -> Question:
    """A question in our own format. Raises BodyError for a wrong one, or an unknown name."""
    if (prompt is None) == (messages is None):
        raise BodyError("a request has either a prompt or messages: give exactly one of them")
    for name in params:
        if name not in SamplingParams.__struct_fields__:
            raise _unknown(name, name, SamplingParams.__struct_fields__)
    return Question(prompt, messages, params, format_of(params))


def decoded(body: dict[str, Any] | bytes, kind: type[Body]) -> Body:
    """A body of that kind, from JSON or decoded JSON. Raises BodyError, which names the field."""
    if body == b"":
        raise BodyError("there is no body: send one in JSON")
    try:
        if isinstance(body, bytes):
            check_json(body)
        return _as(body, kind)
    except (ValueError, RecursionError) as error:
        raise _media_error(body) or _body_error(shortened(str(error)), kind) from error


def _as(body: dict[str, Any] | bytes, kind: type[Body]) -> Body:
    try:
        if isinstance(body, bytes):
            return msgspec.json.decode(body, type=kind)
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as error:
        try:
            given = msgspec.json.decode(body) if isinstance(body, bytes) else body
        except msgspec.ValidationError:  # of a number that no type holds as well
            raise error from None
    return msgspec.convert(_plain(given), kind, str_keys=True)


def _plain(body: Any) -> Any:
    """A body without its members that are null, such as those that are not known here, and with whole numbers such as
    8.0 as integers, as which JSON does not tell them apart; what is in a schema and the like belongs to it."""
    if isinstance(body, list):
        return [_plain(part) for part in body]
    if isinstance(body, float) and body.is_integer() and abs(body) < EXACT:
        return int(body)
    if not isinstance(body, dict):
        return body
    return {name: value if name in FREE else _plain(value) for name, value in body.items() if value is not None}


def body_of(
    completion: Completion, asked: Question, model: str, name: str, prompt_token_ids: list[int] | UnsetType = UNSET
) -> dict[str, Any]:
    """The answer, less the time when it was made: the same tokens make the same body."""
    answer = chat_completion if asked.messages is not None else text_completion
    told = answer(completion, asked.answer_format, name, model, prompt_token_ids)
    body: dict[str, Any] = msgspec.to_builtins(told, str_keys=True)
    return body


def param_of(code: str, message: str, url: str | None) -> str | None:
    """The field to which a daemon's error at that address belongs, where that is known.

    An error about a parameter begins with its name.
    """
    if code == ContextLengthExceeded.code:
        return PROMPTS.get(url or "")
    if code == NotFound.code:
        return "model"
    name = message.partition(" ")[0].partition("[")[0].partition(".")[0].removesuffix(":")
    if name in PROMPTS.values():
        return PROMPTS.get(url or "", name)
    return name if code == InvalidRequest.code and name in _NAMED else None


def error_answer(message: str, status: int, code: str, param: str | None = None) -> ErrorAnswer:
    """An answer that is none."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorAnswer(ErrorDetail(visible(shortened(message)), kind, param and visible(shortened(param)), code))


def _media_error(body: dict[str, Any] | bytes) -> BodyError | None:
    """What is wrong with a body that has an image, a sound or a file among its texts."""
    with suppress(ValueError, RecursionError):
        given = msgspec.json.decode(body) if isinstance(body, bytes) else body
        for where, part in _parts(given):
            kind = part.get("type")
            if isinstance(kind, str) and _MEDIA.search(kind):
                return BodyError(f"{where}: this model takes text alone, and no {kind!r}", f"{where}.type")
    return None


def _parts(body: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of the contents of messages or items, and where each is."""
    for field in ("messages", "input"):
        turns = body.get(field) if isinstance(body, dict) else None
        for position, turn in enumerate(turns if isinstance(turns, list) else []):
            for name in ("content", "output"):
                parts = turn.get(name) if isinstance(turn, dict) else None
                for number, part in enumerate(parts if isinstance(parts, list) else []):
                    if isinstance(part, dict):
                        yield f"{field}[{position}].{name}[{number}]", part


def _unknown(param: str, name: str, known: Iterable[str]) -> BodyError:
    """A field of that name where only these are known; PARAM has its path, too."""
    near = get_close_matches(name, known, n=1, cutoff=0.8)  # parameters of other servers are like none
    return BodyError(f"unknown parameter {param!r}" + (f": did you mean {near[0]!r}?" if near else ""), param)


def _body_error(said: str, kind: type) -> BodyError:
    """What msgspec has against a body of that kind, in words that name the field first."""
    if (unknown := _UNKNOWN.fullmatch(said)) is not None:
        name = ".".join(filter(None, (unknown["path"], unknown["name"])))
        return _unknown(name, unknown["name"], field_names(kind, unknown["path"] or ""))
    if (missing := _MISSING.fullmatch(said)) is not None:
        name = ".".join(filter(None, (missing["path"], missing["name"])))
        return BodyError(f"{name} is missing", name)
    if (wrong := _WRONG.fullmatch(said)) is not None:
        where = f"a key of {wrong['path']}" if wrong["key"] else wrong["path"] or "the body"
        if (choice := _NO_CHOICE.fullmatch(wrong["what"])) and (values := allowed_values(kind, wrong["path"])):
            allowed = " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
            return BodyError(
                f"{where} must be {allowed}, not {_JSON.get(choice['value'], choice['value'])}", wrong["path"]
            )
        why = f"{wrong['what'][:1].lower()}{wrong['what'][1:]}"
        return BodyError(why if why.startswith(where) else f"{where}: {why}", wrong["path"] or None)
    return BodyError(f"the body is not what it should be: {said}")
