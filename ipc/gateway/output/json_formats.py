"""How families of models write that they call a function with a JSON object as its arguments: a row for each way."""

import regex

from ipc.gateway.output.call_format import FUNCTION, ToolFormat, all_of

_KEY = r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
_OBJECT = (
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]{0,128}"\s*,\s*){0,4}'
    r'"(?:tool_)?name"\s*:\s*"(?P<name>[\w.-]{1,128})"\s*,\s*' + _KEY
)
_BAR = "\uff5c"
"""What DeepSeek's marks have in place of |."""
OBJECT_HEADER = regex.compile(rf"\s*(?P<object>{_OBJECT})")
LIST_HEADER = regex.compile(
    rf"\s*(?:\[\s*)?(?P<object>{_OBJECT})|\s*(?P<name>[\w.-]{{1,128}})(?:\[CALL_ID\]\w{{0,128}})?(?:\[ARGS\])?\s*(?=\{{)"
)
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
HUNYUAN_A13B = MISTRAL._replace(
    marker="<tool_calls>",
    closers=(",", "]", "</tool_calls>"),
    around=("<tool_calls>[", "]</tool_calls>"),
    tokens=("<tool_calls>", "</tool_calls>"),
    special=False,
    short_ids=False,
    evidence=regex.compile(r"<tool_calls>\["),
)
APERTUS = MISTRAL._replace(
    marker="<|tools_prefix|>",
    header=regex.compile(rf'\s*(?:\[\s*)?(?P<object>\{{\s*"{FUNCTION}"\s*:\s*(?=\{{))'),
    closers=(",", "]", "<|tools_suffix|>"),
    call=('{"', '": ', "}"),
    around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
    tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
    short_ids=False,
    evidence=regex.compile(r"<\|tools_prefix\|>"),
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
    header=regex.compile(rf"\s*{_CALL}\s*{FUNCTION}\s*{_SEPARATOR}\s*(?=\{{)"),
    closers=(_CALL_END, _CALLS_END),
    call=(_CALL, _SEPARATOR, _CALL_END),
    around=(_CALLS, _CALLS_END),
    tokens=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    special=True,
    evidence=regex.compile(_CALLS),
)
DEEPSEEK_V3 = DEEPSEEK_V31._replace(
    header=regex.compile(rf"\s*{_CALL}\s*function{_SEPARATOR}\s*{FUNCTION}\s*```json\s*(?=\{{)"),
    closers=("```", *DEEPSEEK_V31.closers),
    call=(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"),
    between="\n",
    evidence=all_of(_CALLS, "```json"),
)
COMMAND_R = COHERE._replace(
    marker="Action:",
    header=regex.compile(rf"\s*```json{LIST_HEADER.pattern}|{LIST_HEADER.pattern}"),
    closers=(",", "]", "```"),
    call=('{"tool_name": "', '", "parameters": ', "}"),
    around=("Action: ```json\n[\n    ", "\n]```"),
    tokens=(),
    special=False,
    evidence=all_of("Action:", "```json", "tool_name"),
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
SOLAR_OPEN = ToolFormat(
    marker="<|tool_calls|>",
    first="<|tool_call:begin|>",
    header=regex.compile(
        rf"\s*<\|tool_call:begin\|>\s*[\w-]{{0,128}}\s*<\|tool_call:name\|>\s*{FUNCTION}\s*"
        r"<\|tool_call:args\|>\s*(?=\{)"
    ),
    closers=("<|tool_call:end|>",),
    call=("<|tool_call:begin|>0000000000<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    around=("<|tool_calls|>", ""),
    tokens=(
        *("<|begin|>", "<|think|>", "<|content|>", "<|end|>", "<|tool_calls|>"),
        *(f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")),
    ),
    evidence=regex.compile(r"<\|tool_call:begin\|>"),
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
