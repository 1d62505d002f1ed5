"""How families of models write that they call a function: a row for each way."""

from collections.abc import Callable
from typing import NamedTuple

import regex

from ipc.gateway.output.argument_readers import Tags
from ipc.gateway.output.call_literals import GEMMA_QUOTE, Call, gemma_calls, python_calls

_KEY = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_OBJECT = (
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]{0,128}"\s*,\s*){0,4}'
    r'"(?:tool_)?name"\s*:\s*"(?P<name>[\w.-]{1,128})"\s*,\s*' + _KEY
)
_BAR = "\uff5c"
"""What DeepSeek's marks have in place of |."""
_FUNCTION = r"(?P<name>[\w.-]{1,128})"
OBJECT_HEADER = regex.compile(rf"\s*(?P<object>{_OBJECT})")
LIST_HEADER = regex.compile(
    rf"\s*(?:\[\s*)?(?P<object>{_OBJECT})|\s*(?P<name>[\w.-]{{1,128}})(?:\[CALL_ID\]\w{{0,128}})?(?:\[ARGS\])?\s*(?=\{{)"
)


def _all_of(*texts: str) -> "regex.Pattern[str]":
    """Matches what has all of these, in any order, in linear time."""
    return regex.compile(r"\A" + "".join(f"(?=(?s:.*){text})" for text in texts))


class ToolFormat(NamedTuple):
    """The format of a call, and of all calls of an answer.

    To be read, calls begin with ``marker`` or, where the format is ``bare``, at the very
    beginning with ``first``, with which further calls may begin as well. ``header``, which ends in front of the
    arguments, says the name, and any of ``closers`` may follow. Arguments are a JSON object,
    unless there are ``tags``. An object that has the name elsewhere than the header looks for it
    is a call as well. Where ``calls`` reads them, all that the header begins up to ``last``,
    outside of strings in these ``quotes``, is read at once.

    To be written, it is ``call[0]`` name ``call[1]`` arguments ``call[2]``, ``between`` any two of
    them (None allows no two), and ``around`` all. ``tokens`` of these texts are tokens of their
    own where the model has them, and where they are ``special`` the text has none of them unless
    it is asked for. With ``short_ids`` the chat template takes only ids of nine letters and
    digits.
    """

    marker: str
    header: "regex.Pattern[str]"
    closers: tuple[str, ...]
    call: tuple[str, str, str]
    evidence: "regex.Pattern[str]"
    """Matches the chat templates of models that write this format."""
    tokens: tuple[str, ...] = ()
    between: str | None = ""
    around: tuple[str, str] = ("", "")
    first: str = "{"
    bare: bool = False
    special: bool = False
    short_ids: bool = False
    tags: Tags | None = None
    calls: Callable[[str], list[Call] | None] | None = None
    last: str = ""
    quotes: tuple[str, ...] = ()

    @property
    def has_objects(self) -> bool:
        """Whether a call may be an object with its name in it."""
        return self.first == "{" and self.tags is None


HERMES = ToolFormat(
    marker="<tool_call>",
    header=OBJECT_HEADER,
    closers=("</tool_call>",),
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    between="\n",
    tokens=("<tool_call>", "</tool_call>"),
    # Others write XML between the same marks.
    evidence=regex.compile(r"\A(?!(?s:.*)(?:<function=|<arg_key>|<invoke |<tool_calls>\[))(?s:.*)<tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    marker="<|python_tag|>",
    bare=True,
    header=OBJECT_HEADER,
    closers=(";",),
    call=('{"name": "', '", "parameters": ', "}"),
    between="; ",
    special=True,
    evidence=regex.compile('"parameters": dictionary of argument name'),
)
MISTRAL = ToolFormat(
    marker="[TOOL_CALLS]",
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
GRANITE = MISTRAL._replace(
    marker="<|tool_call|>",
    around=("<|tool_call|>[", "]"),
    tokens=("<|tool_call|>",),
    short_ids=False,
    evidence=regex.compile(r"<\|tool_call\|>"),
)
PHI4_MINI_JSON = MISTRAL._replace(
    marker="functools[",
    around=("functools[", "]"),
    tokens=(),
    special=False,
    short_ids=False,
    evidence=regex.compile(r"functools\["),
)
COHERE = ToolFormat(
    marker="<|START_ACTION|>",
    header=LIST_HEADER,
    closers=(",", "]", "<|END_ACTION|>"),
    call=('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}"),
    between=",\n    ",
    around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    special=True,
    evidence=regex.compile(r"<\|START_ACTION\|>"),
)
_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR = (
    f"<{_BAR}tool▁{name}{_BAR}>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
DEEPSEEK_V31 = ToolFormat(
    marker=_CALLS,
    first=_CALL,
    header=regex.compile(rf"\s*{_CALL}\s*{_FUNCTION}\s*{_SEPARATOR}\s*(?=\{{)"),
    closers=(_CALL_END, _CALLS_END),
    call=(_CALL, _SEPARATOR, _CALL_END),
    around=(_CALLS, _CALLS_END),
    tokens=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    special=True,
    evidence=regex.compile(_CALLS),
)
DEEPSEEK_V3 = DEEPSEEK_V31._replace(
    header=regex.compile(rf"\s*{_CALL}\s*function{_SEPARATOR}\s*{_FUNCTION}\s*```json\s*(?=\{{)"),
    closers=("```", *DEEPSEEK_V31.closers),
    call=(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"),
    between="\n",
    evidence=_all_of(_CALLS, "```json"),
)
COMMAND_R = COHERE._replace(
    marker="Action:",
    header=regex.compile(rf"\s*```json{LIST_HEADER.pattern}|{LIST_HEADER.pattern}"),
    closers=(",", "]", "```"),
    call=('{"tool_name": "', '", "parameters": ', "}"),
    around=("Action: ```json\n[\n    ", "\n]```"),
    tokens=(),
    special=False,
    evidence=_all_of("Action:", "```json", "tool_name"),
)
KIMI_K2 = ToolFormat(
    marker="<|tool_calls_section_begin|>",
    first="<|tool_call_begin|>",
    header=regex.compile(
        r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d{1,9})?\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    tokens=(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
    special=True,
    evidence=regex.compile(r"<\|tool_calls_section_begin\|>"),
)
QWEN3_CODER = ToolFormat(
    marker="<tool_call>",
    bare=True,  # these models leave the mark out at times
    first="<function=",
    header=regex.compile(rf"\s*<function={_FUNCTION}>"),
    closers=("</tool_call>",),
    call=("<tool_call>\n<function=", ">", "\n</function>\n</tool_call>"),
    between="\n",
    tokens=HERMES.tokens,
    tags=Tags(
        regex.compile(r"<parameter=(?P<key>[^<>]{1,256})>"),
        "</parameter>",
        "</function>",
        ("\n<parameter=", ">\n"),
        newlines=True,
    ),
    evidence=_all_of("<tool_call>", "<function="),
)
SEED_OSS = QWEN3_CODER._replace(
    bare=False,
    marker="<seed:tool_call>",
    closers=("</seed:tool_call>",),
    call=("<seed:tool_call>\n<function=", ">", "\n</function>\n</seed:tool_call>"),
    tokens=("<seed:tool_call>", "</seed:tool_call>"),
    tags=Tags(
        regex.compile(r"<parameter=(?P<key>[^<>]{1,256})>"), "</parameter>", "</function>", ("\n<parameter=", ">")
    ),
    evidence=regex.compile("<seed:tool_call>"),
)
GLM45 = ToolFormat(
    marker="<tool_call>",
    first="",
    header=regex.compile(rf"\s*{_FUNCTION}\s*(?=<arg_key>|</tool_call>)"),
    closers=(),
    call=("<tool_call>", "", "\n</tool_call>"),
    between="\n",
    tokens=HERMES.tokens,
    tags=Tags(
        regex.compile(r"<arg_key>(?P<key>[^<>]{1,256})</arg_key>\s*<arg_value>"),
        "</arg_value>",
        "</tool_call>",
        ("\n<arg_key>", "</arg_key>\n<arg_value>"),
    ),
    evidence=regex.compile("<arg_key>"),
)
MINIMAX_M2 = ToolFormat(
    marker="<minimax:tool_call>",
    first="<invoke",
    header=regex.compile(rf'\s*<invoke name="{_FUNCTION}">'),
    closers=("</minimax:tool_call>",),
    call=('\n<invoke name="', '">', "\n</invoke>"),
    around=("<minimax:tool_call>", "\n</minimax:tool_call>"),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    tags=Tags(
        regex.compile(r'<parameter name="(?P<key>[^"<>]{1,256})">'),
        "</parameter>",
        "</invoke>",
        ('\n<parameter name="', '">'),
    ),
    evidence=regex.compile("<minimax:tool_call>"),
)
PYTHONIC = ToolFormat(
    marker="<|python_start|>",
    bare=True,
    first="[",
    header=regex.compile(rf"\s*\[\s*{_FUNCTION}\s*\("),
    closers=("<|python_end|>",),
    call=("", "(", ")"),
    between=", ",
    around=("[", "]"),
    special=True,
    calls=python_calls,
    last="]",
    quotes=('"', "'"),
    evidence=regex.compile(r"\[func_name1\(|<\|python_start\|>"),
)
OLMO3 = PYTHONIC._replace(
    marker="<function_calls>",
    bare=False,
    first="",
    header=regex.compile(rf"\s*{_FUNCTION}\s*\("),
    closers=(),
    between="\n",
    around=("<function_calls>", "</function_calls>"),
    special=False,
    last="</function_calls>",
    evidence=regex.compile("<function_calls>"),
)
GEMMA4 = ToolFormat(
    marker="<|tool_call>",
    first="",
    header=regex.compile(rf"\s*call:{_FUNCTION}\{{"),
    closers=(),
    call=("<|tool_call>call:", "", "<tool_call|>"),
    tokens=("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
    special=True,
    calls=gemma_calls,
    last="<tool_call|>",
    quotes=(GEMMA_QUOTE,),
    evidence=regex.compile(r"<\|tool_call>"),
)
HARMONY = ToolFormat(
    marker="<|channel|>commentary to=",
    header=regex.compile(r"(?!)"),  # ipc.gateway.output.harmony reads it
    closers=(),
    call=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    between=None,
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    special=True,
    evidence=regex.compile(r"<\|channel\|>commentary"),
)
TOOL_FORMATS = {
    "hermes": (HERMES,),
    "llama3_json": (LLAMA3_JSON,),
    "pythonic": (PYTHONIC,),
    "llama4_pythonic": (PYTHONIC,),
    "mistral": (MISTRAL_ARGS, MISTRAL),
    "openai": (HARMONY,),
    "qwen3_coder": (QWEN3_CODER,),
    "qwen3_xml": (QWEN3_CODER,),
    "glm45": (GLM45,),
    "seed_oss": (SEED_OSS,),
    "minimax_m2": (MINIMAX_M2,),
    "deepseek_v3": (DEEPSEEK_V3,),
    "deepseek_v31": (DEEPSEEK_V31,),
    "kimi_k2": (KIMI_K2,),
    "gemma4": (GEMMA4,),
    "granite": (GRANITE,),
    "cohere": (COHERE, COMMAND_R),
    "olmo3": (OLMO3,),
    "phi4_mini_json": (PHI4_MINI_JSON,),
}
"""By vLLM's names; of several formats the first that the chat template shows, or the last."""


def tool_format_of(chat_template: str, name: str | None = None) -> ToolFormat | None:
    """The format of that name, or the one that the chat template shows; None if it shows none."""
    rows = [row for rows in TOOL_FORMATS.values() for row in rows] if name is None else TOOL_FORMATS[name]
    evident = next((row for row in rows if row.evidence.search(chat_template)), None)
    return evident if name is None or evident is not None else rows[-1]
