"""The bodies of OpenAI's requests, with the fields of SamplingParams beside OpenAI's.

An unknown field is refused by name. A null is the same as no field.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.request_limits import MAX_LOGPROBS, MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS
from engine.structured_outputs import StructuredOutputsParams
from ipc.openai.answer_format import AnswerFormat
from ipc.openai.chat_messages import ChatMessage
from ipc.openai.chat_tools import Function, NamedTool, Tool, ToolChoice, ToolUse
from ipc.openai.form_fields import FORM, FormFields
from ipc.openai.question import BodyError, Prompt, Question
from ipc.openai.shared_fields import ReasoningEffort, Sampling, StreamOptions, Verbosity
from ipc.openai.structural_tag import MAX_TAGS, TagStructure, tag_grammar

DEFAULT_MAX_TOKENS = 16
"""Of a text's completion, where the body does not say."""


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema for the text, which always holds, whatever ``strict`` is."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON, and vLLM's to ask for it behind triggers."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[list[TagStructure], Meta(max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[str], Meta(max_length=MAX_TAGS)] | None = None


class _Request(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What completions of texts and of chats have. ``length_penalty`` is for beam search alone; what is truncated of a
    prompt is its left side."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = None

    structured_outputs: StructuredOutputsParams | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream has one more chunk, with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continues_usage(self) -> bool:
        """Whether all other chunks have the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def answer_format(self, num_logprobs: int | None) -> AnswerFormat:
        """What the answer has beside its text."""
        return AnswerFormat(
            num_logprobs or 0,
            with_token_ids=bool(self.return_token_ids) or self.detokenize is False,
            with_prompt_token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
        )

    def _params(self) -> tuple[dict[str, Any], FormFields]:
        """SamplingParams but for ``logprobs`` and the kind's defaults, and where the form is; raises BodyError."""
        if self.stream_options is not None and not self.stream:
            raise BodyError("stream_options are for a stream: send stream: true, or leave them out", "stream_options")
        form, field = _form(self)
        return self._shared_params() | ({} if form is None else {FORM: form}), FormFields(field)


class ChatCompletionRequest(_Request, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    echo: Literal[False] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    modalities: list[Literal["text"]] | None = None

    def question(self) -> Question:
        """What to ask our client; raises BodyError."""
        params, form_fields = self._params()
        most = self.max_completion_tokens
        if most is not None and params.setdefault("max_tokens", most) != most:
            raise BodyError("max_tokens and max_completion_tokens differ: leave one of them out", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        if self.add_special_tokens:
            raise BodyError("add_special_tokens is for a prompt: a chat template has its own", "add_special_tokens")
        use = self.tool_use()
        messages = [message.as_dict() for message in self.messages]
        switches = template_switches(self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message)
        hints = hints_of(reasoning_effort=self.reasoning_effort, verbosity=self.verbosity)
        answer_format = self.answer_format(self.top_logprobs)
        tools = use.as_dict() if use else None
        names = {} if self.max_tokens is not None else {"max_tokens": "max_completion_tokens"}
        return Question(
            None, messages, params, answer_format, tools, switches, hints, form_fields=form_fields, names=names
        )

    def tool_use(self) -> ToolUse | None:
        """What may be called; None where nothing may."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return tool_use(
            [tool.function for tool in self.tools or []],
            str(self.tool_choice or "auto"),
            named,
            self.parallel_tool_calls,
        )


class CompletionRequest(_Request, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/completions``; ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def questions(self) -> list[Question]:
        """What to ask our client, for each prompt; raises BodyError."""
        if self.suffix:
            raise BodyError("suffix is not supported", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BodyError("best_of must be n, or left out: samples are not chosen among here", "best_of")
        given, form_fields = self._params()
        params = {"max_tokens": DEFAULT_MAX_TOKENS} | given
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
        prompts, n = self.prompts(), self.n or 1
        if len(prompts) * n > MAX_PROMPTS:
            why = f"a body may ask for {MAX_PROMPTS} completions, not {len(prompts)} prompts times n, which is {n}"
            raise BodyError(why, "prompt")
        answer_format, special = self.answer_format(self.logprobs), self.add_special_tokens is not False
        first = Question(prompts[0], None, params, answer_format, add_special_tokens=special, form_fields=form_fields)
        return [first._replace(prompt=prompt, params=dict(params)) for prompt in prompts]

    def prompts(self) -> list[Prompt]:
        """One or many; raises BodyError where they are not all of a kind."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(one, int) for one in given):
            return [[one for one in given if isinstance(one, int)]]
        prompts = [one for one in given if not isinstance(one, int)]
        if not given or len({type(one) for one in given}) > 1:
            raise BodyError("prompt must be a text, token ids, or a list of either that is not empty", "prompt")
        return prompts


def template_switches(
    kwargs: dict[str, Any] | None, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> dict[str, Any] | None:
    """Switches for the chat template, with how the conversation ends; None if there are none."""
    ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    return {**(kwargs or {}), **{name: value for name, value in ends.items() if value is not None}} or None


def hints_of(**hints: str | None) -> dict[str, str]:
    """Those that are given."""
    return {name: value for name, value in hints.items() if value is not None}


def tool_use(functions: list[Function], choice: str, named: str | None, parallel: bool | None) -> ToolUse | None:
    """The functions that may be called; None for no function. Raises BodyError."""
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise BodyError("tools must have different names", "tools")
    if named is not None and named not in names:
        raise BodyError(f"tool_choice: there is no function {named!r} among the tools", "tool_choice")
    if choice == "required" and not functions:
        raise BodyError("tool_choice cannot be required without tools", "tool_choice")
    if choice == "none" or not functions:
        return None
    forced = [function for function in functions if function.name == named or choice == "required"]
    return ToolUse(functions, forced, parallel is not False)


GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's former names for the fields of ``structured_outputs``."""


FIELDS_BY_TYPE = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}
"""Of a ``response_format``, beside its type."""
FIELD_OF_TYPE = {
    "json_object": "response_format",
    "json_schema": "response_format.json_schema.schema",
    "structural_tag": "response_format.structures",
}
"""Where a ``response_format`` says the form."""


def check_fields(where: str, given: Struct, kind: str, names: Collection[str]) -> None:
    """Raises BodyError for a field that is given and is none of those which its ``type``, this kind, has."""
    for name in given.__struct_fields__:
        if name not in ("type", *names) and getattr(given, name) is not None:
            raise BodyError(f"{where}.{name} must be left out where {where}.type is {kind}", f"{where}.{name}")


def _form(request: _Request) -> tuple[dict[str, Any] | None, str]:
    """The form of the text, from any one of the fields that can set it, and that field, or the one in it."""
    said: dict[str, tuple[dict[str, Any], str]] = {
        name: ({form: getattr(request, name)}, name)
        for name, form in GUIDED.items()
        if getattr(request, name) is not None
    }
    ours, theirs = request.structured_outputs, request.response_format
    if ours is not None:
        said[FORM] = msgspec.to_builtins(ours), f"{FORM}.{ours.form}"
    if theirs is not None:
        check_fields("response_format", theirs, theirs.type, FIELDS_BY_TYPE.get(theirs.type, ()))
    if theirs is not None and theirs.type != "text":
        said["response_format"] = _json_form(theirs), FIELD_OF_TYPE[theirs.type]
    if len(said) > 1:
        raise BodyError(f"{' and '.join(said)} each say the form of the text: leave all but one out", next(iter(said)))
    return next(iter(said.values()), (None, FORM))


def _json_form(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.type == "structural_tag":
        try:
            return {"grammar": tag_grammar(asked.structures or [], asked.triggers or [])}
        except ValueError as error:
            raise BodyError(f"response_format.{error}", "response_format.structures") from error
    if asked.json_schema is None:
        raise BodyError("response_format of type json_schema needs a json_schema", "response_format")
    return {"json": asked.json_schema.schema}
