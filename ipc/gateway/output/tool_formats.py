"""How families of models write that they call a function: a row for each way."""

from typing import NamedTuple

import regex

_KEY = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_OBJECT = (
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]{0,128}"\s*,\s*){0,4}"name"\s*:\s*"(?P<name>[\w.-]{1,128})"\s*,\s*' + _KEY
)
OBJECT_HEADER = regex.compile(rf"\s*(?P<object>{_OBJECT})")
LIST_HEADER = regex.compile(
    rf"\s*(?:\[\s*)?(?P<object>{_OBJECT})|\s*(?P<name>[\w.-]{{1,128}})(?:\[CALL_ID\]\w{{0,128}})?(?:\[ARGS\])?\s*(?=\{{)"
)


class ToolFormat(NamedTuple):
    """What a call looks like, and all calls of an answer.

    To be read, it begins with ``marker`` or, where it is ``bare``, with the brace of an object at
    the very beginning; ``header``, which ends in front of the arguments' brace, says the name, and
    one of ``closers`` may follow. An object that has the name elsewhere than the header looks for
    it is a call as well.

    To be written, it is ``call[0]`` name ``call[1]`` arguments ``call[2]``, ``between`` any two of
    them, and ``around`` all. ``tokens`` of these texts are tokens of their own where the model has
    them, and where they are ``special`` the text has none of them unless it is asked for. With
    ``short_ids`` the chat template takes only ids of nine letters and digits.
    """

    marker: str
    bare: bool
    header: "regex.Pattern[str]"
    closers: tuple[str, ...]
    call: tuple[str, str, str]
    between: str
    around: tuple[str, str]
    tokens: tuple[str, ...]
    special: bool
    short_ids: bool
    evidence: "regex.Pattern[str]"
    """Matches the chat templates of models that write this format."""


HERMES = ToolFormat(
    marker="<tool_call>",
    bare=False,
    header=OBJECT_HEADER,
    closers=("</tool_call>",),
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    around=("", ""),
    tokens=("<tool_call>", "</tool_call>"),
    special=False,
    short_ids=False,
    evidence=regex.compile(r"\A(?!(?s:.*)<function=)(?s:.*)<tool_call>"),  # Qwen3-Coder's are XML
)
LLAMA3_JSON = ToolFormat(
    marker="<|python_tag|>",
    bare=True,
    header=OBJECT_HEADER,
    closers=(";",),
    call=('{"name": "', '", "parameters": ', "}"),
    between="; ",
    around=("", ""),
    tokens=(),
    special=True,
    short_ids=False,
    evidence=regex.compile('"parameters": dictionary of argument name'),
)
MISTRAL = ToolFormat(
    marker="[TOOL_CALLS]",
    bare=False,
    header=LIST_HEADER,
    closers=(",", "]"),
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    tokens=("[TOOL_CALLS]",),
    special=True,
    short_ids=True,
    evidence=regex.compile(r"\[TOOL_CALLS\]"),
)
MISTRAL_ARGS = MISTRAL._replace(
    call=("[TOOL_CALLS]", "[ARGS]", ""),
    between="",
    around=("", ""),
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    evidence=regex.compile(r"\[ARGS\]"),
)
TOOL_FORMATS = {"hermes": (HERMES,), "llama3_json": (LLAMA3_JSON,), "mistral": (MISTRAL_ARGS, MISTRAL)}
"""By vLLM's names; of several formats the first that the chat template shows, or the last."""


def tool_format_of(chat_template: str, name: str | None = None) -> ToolFormat | None:
    """The format of that name, or the one that the chat template shows; None if it shows none."""
    rows = [row for rows in TOOL_FORMATS.values() for row in rows] if name is None else TOOL_FORMATS[name]
    evident = next((row for row in rows if row.evidence.search(chat_template)), None)
    return evident if name is None or evident is not None else rows[-1]
