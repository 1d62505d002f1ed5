"""How families of models write that they call a function: by tags, by literals, and what there is by name."""

import regex

from ipc.gateway.output.argument_readers import Tags
from ipc.gateway.output.call_format import FUNCTION, ToolFormat, all_of
from ipc.gateway.output.call_literals import GEMMA_QUOTE, gemma_calls, python_calls
from ipc.gateway.output.json_formats import (
    APERTUS,
    COHERE,
    COMMAND_R,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HARMONY,
    HERMES,
    HUNYUAN_A13B,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PHI4_MINI_JSON,
    SOLAR_OPEN,
)

_PARAMETERS = Tags(
    regex.compile(r"<parameter=(?P<key>[^<>]{1,256})>"), "</parameter>", "</function>", ("\n<parameter=", ">")
)
QWEN3_CODER = ToolFormat(
    marker="<tool_call>",
    bare=True,  # these models leave the mark out at times
    first="<function=",
    header=regex.compile(rf"\s*<function={FUNCTION}>"),
    closers=("</tool_call>",),
    call=("<tool_call>\n<function=", ">", "\n</function>\n</tool_call>"),
    between="\n",
    tokens=HERMES.tokens,
    tags=_PARAMETERS._replace(key=("\n<parameter=", ">\n"), newlines=True),
    evidence=all_of("<tool_call>", "<function="),
)
MIMO = QWEN3_CODER._replace(
    between="",
    tags=_PARAMETERS,
    evidence=all_of("<tool_call>", "<function=", r"<parameter=[^<>]{1,256}>[^<>\n\\\\'\"]+</parameter>"),
)
SEED_OSS = QWEN3_CODER._replace(
    bare=False,
    marker="<seed:tool_call>",
    closers=("</seed:tool_call>",),
    call=("<seed:tool_call>\n<function=", ">", "\n</function>\n</seed:tool_call>"),
    tokens=("<seed:tool_call>", "</seed:tool_call>"),
    tags=_PARAMETERS,
    evidence=regex.compile("<seed:tool_call>"),
)
GLM45 = ToolFormat(
    marker="<tool_call>",
    first="",
    header=regex.compile(rf"\s*{FUNCTION}\s*(?=<arg_key>|</tool_call>)"),
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


def _hy_v3(suffix: str, evidence: "regex.Pattern[str]") -> ToolFormat:
    """Hunyuan 3's format with this suffix in all its marks."""
    calls, call, separator, key, value = (
        f"{name}{suffix}>" for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    )
    return ToolFormat(
        marker=f"<{calls}",
        first=f"<{call}",
        header=regex.compile(rf"\s*<{call}\s*{FUNCTION}\s*<{separator}"),
        closers=(f"</{calls}",),
        call=(f"\n<{call}", f"<{separator}", f"\n</{call}"),
        around=(f"<{calls}", f"\n</{calls}"),
        tokens=(
            f"<{separator}",
            *(f"<{slash}{name}" for name in (calls, call, key, value) for slash in ("", "/")),
        ),
        special=True,
        tags=Tags(
            regex.compile(rf"<{key}(?P<key>[^<>]{{1,256}})</{key}\s*<{value}"),
            f"</{value}",
            f"</{call}",
            (f"\n<{key}", f"</{key}\n<{value}"),
        ),
        evidence=evidence,
    )


HY_V3 = _hy_v3("", regex.compile("<tool_sep>"))
HY_V3_OPENSOURCE = _hy_v3(":opensource", regex.compile("<tool_sep:opensource>|<tool_sep{}>"))
MINIMAX_M2 = ToolFormat(
    marker="<minimax:tool_call>",
    first="<invoke",
    header=regex.compile(rf'\s*<invoke name="{FUNCTION}">'),
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
    header=regex.compile(rf"\s*\[\s*{FUNCTION}\s*\("),
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
LFM2 = PYTHONIC._replace(
    marker="<|tool_call_start|>",
    bare=False,
    closers=("<|tool_call_end|>",),
    around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    evidence=regex.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>|List of tools: \["),
)
OLMO3 = PYTHONIC._replace(
    marker="<function_calls>",
    bare=False,
    first="",
    header=regex.compile(rf"\s*{FUNCTION}\s*\("),
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
    header=regex.compile(rf"\s*call:{FUNCTION}\{{"),
    closers=(),
    call=("<|tool_call>call:", "", "<tool_call|>"),
    tokens=("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
    special=True,
    calls=gemma_calls,
    last="<tool_call|>",
    quotes=(GEMMA_QUOTE,),
    evidence=regex.compile(r"<\|tool_call>"),
)
TOOL_FORMATS = {
    "hermes": (HERMES,),
    "ernie45": (HERMES,),
    "llama3_json": (LLAMA3_JSON,),
    "pythonic": (PYTHONIC,),
    "llama4_pythonic": (PYTHONIC,),
    "mistral": (MISTRAL_ARGS, MISTRAL),
    "openai": (HARMONY,),
    "mimo": (MIMO,),
    "qwen3_coder": (QWEN3_CODER,),
    "qwen3_xml": (QWEN3_CODER,),
    "hy_v3": (HY_V3_OPENSOURCE, HY_V3),
    "glm45": (GLM45,),
    "glm47": (GLM45,),
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
    "lfm2": (LFM2,),
    "hunyuan_a13b": (HUNYUAN_A13B,),
    "apertus": (APERTUS,),
    "solar_open": (SOLAR_OPEN,),
}
"""By vLLM's names; of several formats the first that the chat template shows, or the last."""


def tool_format_of(chat_template: str, name: str | None = None) -> ToolFormat | None:
    """The format of that name, or the one that the chat template shows; None if it shows none."""
    rows = [row for rows in TOOL_FORMATS.values() for row in rows] if name is None else TOOL_FORMATS[name]
    evident = next((row for row in rows if row.evidence.search(chat_template)), None)
    return evident if name is None or evident is not None else rows[-1]
