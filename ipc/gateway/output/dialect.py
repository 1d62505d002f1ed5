"""How a daemon's model writes its thoughts and its calls of functions."""

import hashlib
from typing import Any

import msgspec

from driver.text.template_words import template_names
from ipc.async_client import AsyncClient
from ipc.errors import RequestFailed
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.json_formats import HARMONY
from ipc.gateway.output.reasoning import HARMONY_REASONING, REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from ipc.gateway.output.tool_formats import tool_format_of

TAIL = 16
"""Tokens at the end of a prompt that show whether the model continues in reasoning."""
MAX_PROMPTS = 64
"""Sets of chat template switches with cached prompt endings."""


class Dialect:
    """A model's output format, from its tokenizer and chat template, or as the operator set it.

    ``token_ids`` has the formats' marks that are single tokens, ``template_names`` the names that
    the chat template reads.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        token_ids: dict[str, int],
        template_names: frozenset[str] = frozenset(),
    ) -> None:
        self.tool_format = tool_format
        self.reasoning_format = reasoning_format
        self.token_ids = token_ids
        self.template_names = template_names
        self._openings: dict[bytes, bool | None] = {}

    async def opening(self, client: AsyncClient, chat_template_kwargs: dict[str, Any] | None) -> bool | None:
        """Whether prompts end inside the reasoning marks, after them, or neither (None)."""
        if self.reasoning_format is None or self.reasoning_format.channels:  # its prompts end before any
            return None
        key = hashlib.sha256(msgspec.msgpack.encode(chat_template_kwargs)).digest()  # they may be megabytes
        if key not in self._openings:
            if len(self._openings) == MAX_PROMPTS:
                self._openings.clear()
            self._openings[key] = await _opening(client, self.reasoning_format, chat_template_kwargs)
        return self._openings[key]


async def dialect_of(client: AsyncClient, tool_call_parser: str | None, reasoning_parser: str | None) -> Dialect:
    """The dialect of a daemon's model; the parsers, by vLLM's names, override its template."""
    info = await client.tokenizer_info()
    template = info.get("chat_template") or ""
    names = template_names(template)
    if isinstance(template, dict):  # several, by name
        template = "\n".join(template.values())
    tools = tool_format_of(template, tool_call_parser)
    thinks = REASONING_FORMATS[reasoning_parser] if reasoning_parser else reasoning_format_of(template)
    if tools is HARMONY:  # its messages are of both kinds
        thinks = HARMONY_REASONING
    special = frozenset(info.get("additional_special_tokens", ()))
    if tools is not None and not tools.special and not special.isdisjoint(tools.tokens):
        tools = tools._replace(special=True)  # as IQuest-Coder's marks are, and not Qwen's, though they are the same
    if thinks is not None and not thinks.special and not special.isdisjoint(thinks.marks):
        thinks = thinks._replace(special=True)
    marks = (*(tools.tokens if tools else ()), *(thinks.marks if thinks else ()))
    found = {mark: await client.tokenize(mark, add_special_tokens=False) for mark in marks}
    single = {mark: token_ids[0] for mark, token_ids in found.items() if len(token_ids) == 1}
    return Dialect(tools, thinks, single, names)


async def _opening(
    client: AsyncClient, row: ReasoningFormat, chat_template_kwargs: dict[str, Any] | None
) -> bool | None:
    """As seen where the shortest conversation ends."""
    probe = [{"role": "user", "content": "?"}]
    try:
        token_ids = await client.tokenize(messages=probe, chat_template_kwargs=chat_template_kwargs)
    except RequestFailed as error:
        if error.code != "invalid_request":
            raise
        return None  # that template wants more, or the request itself is wrong and will be refused
    tail = (await client.detokenize(token_ids[-TAIL:])).rstrip()
    return True if tail.endswith(row.start) else False if tail.endswith(row.end) and not row.between else None
