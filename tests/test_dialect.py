"""How a model writes calls and reasoning, as its chat template, its tokenizer and its prompts show."""

import asyncio
from typing import Any, cast

import pytest

from ipc.async_client import AsyncClient
from ipc.gateway.output.dialect import Dialect, dialect_of
from ipc.gateway.output.json_formats import HARMONY
from ipc.gateway.output.reasoning import REASONING_FORMATS, reasoning_format_of
from ipc.gateway.output.tool_formats import GEMMA4, TOOL_FORMATS, tool_format_of


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("<tool_call>\n<function=x>", "qwen3_coder", None),
        ("<tool_call>{{ name }}\n<arg_key> <think></think>", "glm45", "qwen3"),
        ("<seed:tool_call><function= <seed:think></seed:think>", "seed_oss", "seed_oss"),
        ("<minimax:tool_call><invoke name= <think></think><response>x</response>", "minimax_m2", "qwen3"),
        ("[func_name1(a=b)]", "pythonic", None),
        ("<|channel|>commentary <|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("<|tool_call>call: <|channel>thought\n<channel|>", "gemma4", "gemma4"),
        ("<|tool_call|> <think></think> <response></response>", "granite", "granite"),
        ("[TOOL_CALLS][ARGS][THINK][/THINK]", "mistral", "mistral"),
        ("<\uff5ctool▁calls▁begin\uff5c> ```json <think></think>", "deepseek_v3", "qwen3"),
        ("<\uff5ctool▁calls▁begin\uff5c> <think></think>", "deepseek_v31", "qwen3"),
        ("<mm:think> <tool_call> <invoke name=", None, None),
        ('<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', "hunyuan_a13b", None),
        ("{% set HYTK = ':opensource' %}{% set sep = '<tool_sep{}>'.format(HYTK) %}{% set key = '<arg_key{}>'.format(HYTK) %}", "hy_v3", None),
        ("{% set HYTK = ':opensource' %}{% set start = '<think{}>'.format(HYTK) %}<tool_sep:opensource>", "hy_v3", "hy_v3"),
        ("<|extra_0|>{{- '<think>\\n\\n</think>\\n' }}<tool_calls>[{", "hunyuan_a13b", "hunyuan_a13b"),
        ("<global_setting>\\nthink_mode=True <think> <response>\\n <tool_call>", "ernie45", "ernie45"),
        ("<|begin|>assistant<|think|><|end|> <|content|> <|tool_call:begin|>", "solar_open", "solar_open"),
        ("<|inner_prefix|> <|inner_suffix|> <|tools_prefix|>", "apertus", "apertus"),
        ("<tool_call>\\n<function=f>\\n<parameter=a>value</parameter>\\n<parameter=b>one\\ntwo</parameter>", "mimo", None),
        ("<tool_call>\\n<function=f>\\n<parameter=a>\\nvalue\\n</parameter>\\n", "qwen3_coder", None),
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}", "apertus", None),
    ],
)  # fmt: skip
def test_a_template_shows_its_formats(template: str, tools: str | None, thinks: str | None) -> None:
    """By words that no other family's template has."""
    assert tool_format_of(template) == (None if tools is None else TOOL_FORMATS[tools][0])
    assert reasoning_format_of(template) == (None if thinks is None else REASONING_FORMATS[thinks])
    assert tool_format_of(template, "openai") == HARMONY


def test_a_format_with_a_suffix_is_that_of_its_template() -> None:
    """Hunyuan 3's marks have one since it is out of its preview."""
    suffixed, bare = TOOL_FORMATS["hy_v3"]

    assert tool_format_of("<tool_call>{{ name }}<tool_sep>\n<arg_key>{{ key }}</arg_key>") == bare
    assert tool_format_of("<tool_sep:opensource>") == suffixed
    assert tool_format_of("", "hy_v3") == bare


class PromptEnds:
    """A client of a model whose prompts end so."""

    def __init__(self, end: str) -> None:
        self._end = end

    async def tokenize(self, **_: Any) -> list[int]:
        return [1]

    async def detokenize(self, _: list[int]) -> str:
        return self._end


@pytest.mark.parametrize(
    ("name", "end", "opened"),
    [
        ("seed_oss", "<seed:think>\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("cohere", "<|CHATBOT_TOKEN|>", None),
        ("openai_gptoss", "<|end|><|start|>assistant", None),
        ("solar_open", "<|begin|>user<|content|>?<|end|><|begin|>assistant", None),
    ],
)
def test_a_prompt_may_begin_or_end_reasoning(name: str, end: str, opened: bool | None) -> None:
    """But for gpt-oss's and Solar Open's, which end as their reasoning does."""
    client = cast(AsyncClient, PromptEnds(end))

    assert asyncio.run(Dialect(None, REASONING_FORMATS[name], {}).opening(client, None)) is opened


class Described:
    """A client of a model with this chat template and these special tokens."""

    def __init__(self, chat_template: str, *special: str) -> None:
        self._info = {"chat_template": chat_template, "additional_special_tokens": list(special)}

    async def tokenizer_info(self) -> dict[str, Any]:
        return self._info

    async def tokenize(self, *_: Any, **__: Any) -> list[int]:
        return [1]


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_marks_are_asked_for_where_they_are_special_tokens(calls: bool, thinks: bool) -> None:
    """They are left out of the text otherwise, of IQuest-Coder's as of any."""
    special = ["<tool_call>"] * calls + ["</think>"] * thinks
    client = Described("<tool_call>\\n<function=f>\\n<parameter=a>\\n <think></think>", "<|end|>", *special)

    dialect = asyncio.run(dialect_of(cast(AsyncClient, client), None, None))

    assert dialect.tool_format == TOOL_FORMATS["qwen3_coder"][0]._replace(special=calls)
    assert dialect.reasoning_format == REASONING_FORMATS["qwen3"]._replace(special=thinks)
    gemma = asyncio.run(dialect_of(cast(AsyncClient, Described("", "<|tool_call>")), "gemma4", None))
    assert gemma.tool_format is GEMMA4
