"""The requests of OpenAI's Responses API, and the questions that they become.

They may have the same fields of SamplingParams as a chat. A gateway stores nothing:
``previous_response_id``, ``conversation`` and items that refer to stored ones are refused. It
truncates nothing: ``truncation`` "auto" is the same as "disabled".
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from engine.request_limits import MAX_LOGPROBS, MAX_MESSAGES, MAX_TOOLS
from ipc.gateway.responses_api.sealed_reasoning import opened
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.chat_messages import part_text
from ipc.openai.chat_tools import Function, FunctionName, ToolUse
from ipc.openai.form_fields import FormFields
from ipc.openai.question import BodyError, Question
from ipc.openai.request_bodies import check_fields, hints_of, tool_use
from ipc.openai.shared_fields import ReasoningEffort, Sampling, Verbosity

Never = Annotated[list[Any], Meta(max_length=0)]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What a response may ``include``."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A text among those of an item. A refusal is what was said."""

    text: str | None = None
    type: Literal["input_text", "output_text", "reasoning_text", "refusal", "summary_text", "text"] = "input_text"
    refusal: str | None = None
    annotations: Never | None = None
    logprobs: list[Any] | None = None

    def __post_init__(self) -> None:
        part_text(self)


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of the conversation, by the user or the model; ``type`` says which fields it has.

    The ``phase`` of a message by a model of OpenAI is not read.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be called."""

    name: FunctionName
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str
    type: Literal["function"] = "function"


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the output text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a model is to reason. There are no summaries: the reasoning itself is shown."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Without obfuscation a stream has no padding; here it never has."""

    include_obfuscation: bool | None = None


class ResponseRequest(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None

    def question(self) -> Question:
        """The request to our client; raises BodyError."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise BodyError(f"{name}: nothing is kept here: send the whole conversation as the input", name)
        params = self._shared_params()
        if self.max_output_tokens is not None:
            params["max_tokens"] = self.max_output_tokens
        if self.shows_logprobs:
            params["logprobs"] = self.top_logprobs or 0
        form = self._form()
        if form is not None:
            params["structured_outputs"] = form
        use = self.tool_use()
        effort = None if self.reasoning is None else self.reasoning.effort
        hints = hints_of(reasoning_effort=effort, verbosity=None if self.text is None else self.text.verbosity)
        return Question(
            None,
            self._messages(),
            params,
            AnswerFormat(self.top_logprobs or 0),
            use.as_dict() if use else None,
            self.chat_template_kwargs,
            hints,
            form_fields=FormFields("text.format" if form is None or "json" not in form else "text.format.schema"),
            names={"max_tokens": "max_output_tokens", "messages": "input"},
        )

    @property
    def seals_reasoning(self) -> bool:
        """Whether items of reasoning have an ``encrypted_content``."""
        return ENCRYPTED in (self.include or [])

    @property
    def shows_logprobs(self) -> bool:
        """Whether texts come with log-probabilities; raises BodyError for an unknown
        ``include``."""
        for name in self.include or []:
            if name not in (LOGPROBS, ENCRYPTED):
                raise BodyError(f"include: there are {LOGPROBS} and {ENCRYPTED} here, and no {name!r}", "include")
        shows = LOGPROBS in (self.include or [])
        if self.top_logprobs and not shows:
            raise BodyError(f"top_logprobs needs include: [{LOGPROBS!r}]", "top_logprobs")
        return shows

    def tool_use(self) -> ToolUse | None:
        """The functions that may be called; None if none may."""
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunctionTool) else None
        functions = [Function(tool.name, tool.description, tool.parameters, tool.strict) for tool in self.tools or []]
        use = tool_use(functions, str(self.tool_choice or "auto"), named, self.parallel_tool_calls)
        return use and use._replace(field="tools[{}].parameters")

    def _form(self) -> dict[str, Any] | None:
        form = TextFormat() if self.text is None or self.text.format is None else self.text.format
        fields = ("name", "schema", "description", "strict") if form.type == "json_schema" else ()
        check_fields("text.format", form, form.type, fields)
        if form.type == "json_schema" and form.schema is None:
            raise BodyError("text.format of type json_schema needs a schema", "text.format")
        return {"text": None, "json_object": {"json_object": True}, "json_schema": {"json": form.schema}}[form.type]

    def _messages(self) -> list[dict[str, Any]]:
        """As our client takes them; adjacent items of the assistant are one turn."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for position, item in enumerate(items):
            message = _message(f"input[{position}]", item)
            if message is None:
                continue
            if message["role"] == "assistant" and messages and _goes_on(messages[-1], message):
                turn = messages[-1]
                for name, nothing in (("content", ""), ("tool_calls", [])):
                    if name in message:
                        turn[name] = turn.get(name, nothing) + message[name]
            else:
                messages.append(message)
        return [{"content": "", **message} for message in messages]


NEEDED = {
    "message": ("role", "content"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": (),
}
"""Fields that an item of a type must have."""


def _message(where: str, item: InputItem) -> dict[str, Any] | None:
    """An item as our client takes it; None for reasoning of which nothing can be read."""
    for name in NEEDED[item.type]:
        if getattr(item, name) is None:
            raise BodyError(f"{where}: an item of type {item.type} needs {name}", f"{where}.{name}")
    match item.type:
        case "message":
            return {"role": item.role, "content": _text(item.content)}
        case "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        case "item_reference":
            raise BodyError(f"{where}: nothing is kept here: send the item itself (store: false)", f"{where}.type")
        case "reasoning":
            thought = _text(item.content or item.summary) or opened(item.encrypted_content or "")
            return {"role": "assistant", "reasoning_content": thought} if thought else None


def _text(parts: str | list[Part] | None) -> str:
    return parts if isinstance(parts, str) else "".join(map(part_text, parts or []))


def _goes_on(turn: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether that is still of the same turn: thoughts come first in one, and what is said behind calls is of theirs, as
    their results come next."""
    if turn["role"] != "assistant" or "reasoning_content" in message:
        return False
    return "content" not in message or "content" not in turn or "tool_calls" in turn
