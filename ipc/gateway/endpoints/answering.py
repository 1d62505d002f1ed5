"""How the model is asked to write a chat's answer, and how that answer is parsed."""

import re
import uuid
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET

from engine.request_limits import MAX_GRAMMAR_BYTES
from engine.structured_outputs import StructuredOutputsParams
from ipc.async_client import AsyncClient
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.dialect import Dialect
from ipc.gateway.output.harmony import HarmonyParser
from ipc.gateway.output.lark import ANYTHING, SPACE, form_of, letters_of, literal, one_of, text_rule
from ipc.gateway.output.output_parser import AnswerParser, OutputParser, whole_output
from ipc.gateway.output.reasoning import ReasoningFormat, ReasoningParser
from ipc.gateway.output.tool_call_parser import ToolCallParser
from ipc.gateway.output.tool_formats import TOOL_FORMATS
from ipc.gateway.output.tool_grammar import call_rules
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.openai.answer_bodies import AssistantMessage
from ipc.openai.chat_tools import FunctionCall, ToolCall, ToolUse
from ipc.openai.form_fields import FORM, FormFields
from ipc.openai.question import BodyError, Question
from ipc.wire.completion import Choice

NO_CALL = r"/([^%s\s]|\s+[^%s\s])(?s:.*)|\s*/"
"""Content, in formats in which such a bracket at the beginning would begin a call."""


class Answering:
    """The output format of one chat: by the model's dialect, how its prompt ends, and the tools.

    ``opened`` is as in ``Dialect.opening``. Raises BodyError where the model has no known format
    for calls.
    """

    def __init__(
        self, dialect: Dialect, opened: bool | None, tool_use: ToolUse | None, *, hides_reasoning: bool = False
    ) -> None:
        self._token_ids = dialect.token_ids
        row = dialect.reasoning_format
        self._thinking = row if row is not None and (opened is not False or row.content[0]) else None
        self._opened = opened
        self._hides_reasoning = hides_reasoning
        self._tools = None if tool_use is None else (_known(dialect.tool_format), tool_use)

    def parser(self) -> AnswerParser:
        """One for a sample."""
        use = None if self._tools is None else self._tools[1]
        functions = {function.name: function.parameters for function in use.callable} if use is not None else {}
        parallel = use is None or use.parallel
        if self._thinking is not None and self._thinking.channels:
            return HarmonyParser(functions, parallel=parallel, hides_reasoning=self._hides_reasoning)
        reasoning = None if self._thinking is None else ReasoningParser(self._thinking, self._opened)
        tool_calls = None
        if self._tools is not None:
            tool_calls = ToolCallParser(self._tools[0], functions, parallel=parallel)
        return OutputParser(reasoning, tool_calls, hides_reasoning=self._hides_reasoning)

    def message(self, choice: Choice) -> tuple[AssistantMessage, str]:
        """A whole sample, and why it ended."""
        output = whole_output(self.parser(), choice.text, choice.finish_reason)
        calls = [ToolCall(self.new_call_id(), FunctionCall(*call)) for call in output.calls]
        thought = output.reasoning or UNSET
        content = output.content or (None if calls or output.reasoning else "")
        return AssistantMessage(content, "assistant", calls or UNSET, thought, thought), output.finish_reason

    def new_call_id(self) -> str:
        """The id of one more call; Mistral's chat template accepts only nine letters."""
        short = self._tools is not None and self._tools[0].short_ids
        return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex}"

    def question(self, asked: Question) -> Question:
        """With SamplingParams for output that the parser can read; raises BodyError."""
        with asked.naming():
            params = self.params(asked.params)
        return (
            asked._replace(params=params) if params.get(FORM) is asked.params.get(FORM) else self._made(asked, params)
        )

    def _made(self, asked: Question, params: dict[str, Any]) -> Question:
        """With these params, whose grammar is made of schemas of functions, or of the form, or of both."""
        use = self._tools and self._tools[1]
        fields = use.schema_fields if use else []
        by_rule = {f"arguments_{number}": field for number, field in enumerate(fields)}
        whole = fields if len(fields) == 1 else ["tools"] if fields else []
        if FORM in asked.params and not (use and use.forced):
            by_rule["said"] = asked.form_fields.whole
            whole = [*whole, asked.form_fields.whole]
        return asked._replace(params=params, form_fields=FormFields(" and ".join(whole), by_rule))

    def params(self, params: dict[str, Any]) -> dict[str, Any]:
        """SamplingParams for output that the parser can read; raises BodyError."""
        given = dict(params)
        if any(row is not None and row.special for row in (self._tools and self._tools[0], self._thinking)):
            given["skip_special_tokens"] = False
        asked = given.get(FORM)
        rules = self._rules(asked)
        return given if rules is None else given | {FORM: {"grammar": self._grammar(rules)}}

    def _grammar(self, rules: Iterable[str]) -> str:
        """These rules. Raises BodyError as soon as there are too many."""
        taken, size = [], -1
        for rule in rules:
            taken.append(rule)
            size += len(rule.encode()) + 1
            if size > MAX_GRAMMAR_BYTES:
                what = FORM if self._tools is None else "tools"
                raise BodyError(f"{what}: their schemas are too large: {MAX_GRAMMAR_BYTES} bytes are taken", what)
        return "\n".join(taken)

    def _rules(self, asked: dict[str, Any] | None) -> Iterable[str] | None:
        """Of the grammar, if one is needed: reasoning, then content of the given form, or calls."""
        said = None if asked is None else f"said: {_form(asked)}"
        if self._tools is not None and (self._tools[1].forced or self._tools[1].strict or asked):
            row, use = self._tools
            start, content, behind = self._start(row, use, said)
            calls = call_rules(
                row, use.callable, self._token_ids, parallel=use.parallel, forced=bool(use.forced), behind=behind
            )
            rules: Iterable[str] = chain(calls, content)
        elif said is not None and self._thinking is not None:
            start, rules = self._content, [said]
        else:
            return None
        if self._thinking is None or self._opened is False:
            return chain((f"start: {start}",), rules)
        thoughts = [f"thought: thoughts {SPACE}", text_rule("thoughts", self._thinking.end, self._token_ids)]
        return chain((f"start: {self._thoughts(self._thinking)} {one_of([start])}",), rules, thoughts)

    @property
    def _content(self) -> str:
        """Content, which is the rule ``said``, between its marks."""
        row = self._thinking
        marks = row.content if row is not None and row.special else ("", "")
        start, end = (literal(mark, self._token_ids) for mark in marks)
        return f"{start} said {end * (row is None or not row.between)}".strip()

    def _start(self, row: ToolFormat, use: ToolUse, said: str | None) -> tuple[str, list[str], str]:
        """The grammar's start, which is calls or content (``said``), the rules of the latter, and what
        stands before ``calls`` already."""
        content = self._content
        if use.forced:
            return "calls", [], ""
        if said is not None:
            return f"{content} | calls", [said], ""
        if content != "said":
            return f"{content} | calls", [f"said: {ANYTHING}"], ""
        if not row.bare:
            marked = text_rule("marked", row.marker, self._token_ids)
            return "said | marked calls", [f"said: {ANYTHING}", marked], row.marker
        first = re.escape(row.first[:1])
        no_call = NO_CALL % (first, first)
        if row.marker in self._token_ids:
            return "said calls?", [f"said: {no_call}"], ""
        return "said | calls", ["said: SAID", f"SAID: ({no_call}) & ~/(?s:.*){letters_of(row.marker)}(?s:.*)/"], ""

    def _thoughts(self, row: ReasoningFormat) -> str:
        start = literal(row.start, self._token_ids)
        if self._opened:
            return "thought"
        return f"{start}? thought" if row.always else f"({start} thought)?"


def _known(tool_format: ToolFormat | None) -> ToolFormat:
    if tool_format is None:
        raise BodyError(
            "the chat template of this model does not tell how it calls tools: if it can, serve with"
            f" --tool-call-parser, which may be {', '.join(TOOL_FORMATS)}",
            "tools",
        )
    return tool_format


def _form(asked: dict[str, Any]) -> str:
    try:
        return form_of(msgspec.convert(asked, StructuredOutputsParams))
    except ValueError as error:
        raise BodyError(str(error), FORM) from error


async def answering_of(
    daemon: RemoteDaemon, client: AsyncClient, asked: Question, tool_use: ToolUse | None, *, hides_reasoning: bool
) -> tuple[Question, Answering]:
    """The question as the model is asked it; raises BodyError, and what asking the daemon may."""
    dialect = await daemon.dialect()
    asked = asked.hinted(dialect.template_names)
    opened = await dialect.opening(client, asked.chat_template_kwargs)
    answering = Answering(dialect, opened, tool_use, hides_reasoning=hides_reasoning)
    return answering.question(asked), answering
