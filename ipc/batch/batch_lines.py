"""The lines of a batch's input: a request each, in OpenAI's batch format or plainly.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}

A plain line has a ``prompt`` (text or token ids) or ``messages``, SamplingParams by name, and may
have a ``custom_id``; without one it is called by its number, ``line-2``.
"""

import codecs
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ipc.errors import BatchError
from ipc.openai.question import Question
from ipc.openai.translation import question, question_of

OPENAI = {"custom_id", "method", "url", "body"}


class Line(NamedTuple):
    """One request; ``url`` is None where it is plain."""

    custom_id: str
    url: str | None
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        """The name that it has for the model, if any."""
        return None if self.url is None else self.body.get("model")

    def question(self, models: Sequence[str] | None) -> Question:
        """The request to the model that has these names, None for any; raises BodyError.

        A line without a seed has one that its ``custom_id`` determines, so that its answer does
        not depend on the run.
        """
        body = dict(self.body)
        if self.url is None:
            asked = question(body.pop("prompt", None), body.pop("messages", None), body)
        else:
            asked = question_of(self.url, body, models)
        if asked.params.get("seed") is None:
            asked.params["seed"] = zlib.crc32(self.custom_id.encode())
        return asked


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file, one a line. Raises BatchError for a wrong one or a repeated name."""
    names: set[str] = set()
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if number == 1:
                    text = text.removeprefix(codecs.BOM_UTF8)  # as programs of Windows begin a file
                if not text.strip():
                    continue
                line = _line(text, f"{path}, line {number}", f"line-{number}")
                if line.custom_id in names:
                    raise BatchError(f"{path}, line {number}: custom_id {line.custom_id!r} is used twice")
                names.add(line.custom_id)
                yield line
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}") from error


def _line(text: bytes, where: str, name: str) -> Line:
    try:
        given = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{where} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise BatchError(f"{where} is no JSON object")
    if "body" not in given and "url" not in given:
        custom_id, url, body = given.pop("custom_id", name), None, given
    elif given.keys() == OPENAI and given["method"] == "POST":
        custom_id, url, body = given["custom_id"], str(given["url"]), given["body"]
    else:
        raise BatchError(f'{where} must have custom_id, method ("POST"), url and body, or be plain')
    if not isinstance(custom_id, str) or not custom_id or not isinstance(body, dict):
        raise BatchError(f"{where}: custom_id must be a string, and body an object")
    return Line(custom_id, url, body)
