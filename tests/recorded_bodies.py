"""Bodies as coding agents and SDKs send them, in the middle of a task: with tools, calls and their results."""

import json
from typing import Any

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What to run."}},
    "required": ["command"],
    "additionalProperties": False,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def tool(**fields: Any) -> dict[str, Any]:
    """A function as chats have it."""
    function = {"name": "shell", "description": "Runs a command.", "parameters": SCHEMA, **fields}
    return {"type": "function", "function": function}


def text(*texts: str, **fields: Any) -> list[dict[str, Any]]:
    """Content in parts."""
    return [{"type": "text", "text": one, **fields} for one in texts]


CHATS: dict[str, dict[str, Any]] = {
    "aider": {
        "messages": [
            {"role": "system", "content": text("Act as an expert developer.", **EPHEMERAL)},
            {"role": "user", "content": "I switched to a new code base."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": text("Write it.", **EPHEMERAL)},
        ],
        "temperature": 0,
        "stream": True,
    },
    "claude code": {
        "messages": [
            {"role": "system", "content": text("You are Claude Code.", "Be brief.", **EPHEMERAL)},
            {"role": "user", "content": text("<system-reminder>", "list the files")},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "README.md", **EPHEMERAL},
        ],
        "tools": [{**tool(), **EPHEMERAL}],
        "tool_choice": "auto",
        "max_tokens": 32000,
        "temperature": 1,
        "metadata": {"user_id": "user_1_account__session_2"},
        "reasoning_effort": "high",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "cline": {
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": text("<task>list</task>", "<environment_details>none</environment_details>")},
        ],
        "temperature": 0,
        "reasoning_effort": "medium",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "continue": {
        "messages": [
            {"role": "system", "content": "<important_rules>"},
            {"role": "user", "content": text("list the files")},
            {"role": "assistant", "content": " ", "tool_calls": [{**CALL, "index": 0}]},
            {"role": "tool", "content": "README.md", "tool_call_id": "call_1"},
        ],
        "max_tokens": 4096,
        "tools": [tool()],
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "langchain": {
        "messages": [
            {"content": "Be brief.", "role": "system"},
            {"content": "list the files", "role": "user", "name": "ann"},
            {"content": None, "role": "assistant", "tool_calls": [CALL], "refusal": None},
            {"content": "README.md", "role": "tool", "tool_call_id": "call_1"},
        ],
        "n": 1,
        "temperature": 0.7,
        "stream": False,
        "tools": [tool(strict=False)],
        "parallel_tool_calls": True,
    },
    "litellm": {
        "messages": [
            {"role": "user", "content": "list the files"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL],
                "function_call": None,
                "reasoning_content": "I list.",
                "provider_specific_fields": {"reasoning": "I list."},
            },
            {"role": "tool", "tool_call_id": "call_1", "name": "shell", "content": "README.md"},
        ],
        "tools": [tool()],
        "max_tokens": 60,
    },
    "llamaindex": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": text("list the files")},
        ],
        "stream": False,
        "temperature": 0.1,
        "max_completion_tokens": 256,
        "tools": [tool(strict=False)],
        "tool_choice": "auto",
    },
    "lm-eval": {
        "messages": [{"role": "user", "content": "Question: 1 + 1\nAnswer:", "type": "text"}],
        "max_tokens": 256,
        "temperature": 0,
        "stop": ["Question:", "</s>"],
        "seed": 1234,
    },
    "openai": {
        "messages": [{"role": "developer", "content": text("Be brief.")}, {"role": "user", "content": "Hello."}],
        "frequency_penalty": 0,
        "logit_bias": None,
        "logprobs": True,
        "max_completion_tokens": 16,
        "metadata": {"team": "a"},
        "modalities": ["text"],
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "reasoning_effort": "none",
        "response_format": {"type": "text"},
        "safety_identifier": "s",
        "seed": 1,
        "service_tier": "auto",
        "stop": None,
        "store": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "temperature": 1,
        "tool_choice": "auto",
        "top_logprobs": 2,
        "top_p": 1,
        "user": "u",
        "verbosity": "low",
    },
    "opencode": {
        "max_tokens": 32000,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You are opencode."},
            {"role": "user", "content": "list the files"},
            {"role": "assistant", "content": "", "reasoning_content": "I list.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "README.md"},
        ],
        "tools": [tool()],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "xhigh",
    },
    "pydantic-ai": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "list the files"}],
        "stream": False,
        "tool_choice": "auto",
        "tools": [tool(strict=True)],
    },
    "roo": {
        "messages": [
            {"role": "developer", "content": "Formatting re-enabled\nYou are Roo."},
            {"role": "user", "content": text("list the files")},
            {"role": "assistant", "content": "I list.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "README.md"},
        ],
        "max_completion_tokens": 8192,
        "reasoning_effort": "minimal",
        "tools": [tool(strict=True)],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "vercel": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "list the files"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"files": ["README.md"]})},
        ],
        "tools": [tool()],
        "tool_choice": "auto",
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
"""Bodies of ``/v1/chat/completions``, by client."""

FUNCTION = {"type": "function", "name": "shell", "description": "Runs a command.", "parameters": SCHEMA}


def turn(role: str, *texts: str) -> dict[str, Any]:
    """A message in the Responses API's form."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": one} for one in texts]}


RESPONSES: dict[str, dict[str, Any]] = {
    "agents": {
        "include": [],
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "list the files"},
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [{"text": "I list.", "type": "reasoning_text"}],
                "encrypted_content": None,
                "status": "completed",
            },
            {
                "id": "msg_1",
                "content": [{"annotations": [], "text": "I list.", "type": "output_text", "logprobs": []}],
                "role": "assistant",
                "status": "completed",
                "type": "message",
                "phase": "commentary",
            },
            {
                "id": "fc_1",
                "arguments": '{"command": "ls"}',
                "call_id": "call_1",
                "name": "shell",
                "type": "function_call",
                "status": "completed",
            },
            {"call_id": "call_1", "output": "README.md", "type": "function_call_output"},
        ],
        "tools": [{**FUNCTION, "strict": True}],
        "parallel_tool_calls": True,
        "metadata": {"trace": "t"},
        "truncation": "auto",
        "stream": False,
    },
    "codex": {
        "instructions": "You are a coding agent running in the Codex CLI.",
        "input": [
            turn("developer", "<permissions instructions>"),
            turn("user", "# AGENTS.md instructions", "<environment_context>"),
            turn("user", "list the files"),
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\nREADME.md\n"},
        ],
        "tools": [{**FUNCTION, "strict": False}, {**FUNCTION, "name": "update_plan", "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
        "client_metadata": {"originator": "codex_cli_rs"},
    },
    "vercel": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I list."}], "id": "msg_1"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "encrypted_content": None,
                "summary": [{"type": "summary_text", "text": "I list."}],
            },
            {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command": "ls"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": '{"files": ["README.md"]}'},
        ],
        "max_output_tokens": 4096,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "detailed"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "user": "u",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "tools": [{**FUNCTION, "strict": False}],
        "tool_choice": "auto",
        "stream": True,
    },
}
"""Bodies of ``/v1/responses``, by client."""
