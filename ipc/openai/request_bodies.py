"""The bodies of OpenAI's requests, with the fields of SamplingParams beside OpenAI's.

An unknown field is refused by name. Fields that OpenAI's clients send and that do not change the
answer are accepted and ignored: ``user``, ``metadata``, ``store``, ``service_tier``,
``safety_identifier``, ``prompt_cache_key``. A null is the same as no field.
"""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from driver.errors import shortened
from engine.request_limits import MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS
from engine.sampling_params import RepetitionDetection, SamplingParams
from engine.structured_outputs import StructuredOutputsParams
from ipc.openai.chat_messages import ChatMessage
from ipc.openai.chat_tools import Function, NamedTool, Tool, ToolChoice, ToolUse

DEFAULT_MAX_TOKENS = 16
"""Of a text's completion, where the body does not say."""

Prompt = str | list[int]

SHARED = frozenset(SamplingParams.__struct_fields__) - {"logprobs", "structured_outputs"}
"""Fields of SamplingParams that a body may have under the same name and in the same meaning."""


class BodyError(Exception):
    """A body that asks for something not served here, with OpenAI's ``status`` and ``code``."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str = "invalid_request"
    ) -> None:
        super().__init__(shortened(message))
        self.param = None if param is None else shortened(param)
        self.status = status
        self.code = code


class Question(NamedTuple):
    """A question for our client: a prompt or messages, SamplingParams, and template options."""

    prompt: Prompt | None
    messages: list[dict[str, Any]] | None
    params: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream: with ``include_usage`` its last event has the usage and no choices."""

    include_usage: bool = False


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema for the text, which always holds, whatever ``strict`` is."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all kinds have. The fields of SamplingParams have its names."""

    model: str | None = None
    stream: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    priority: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def _shared_params(self) -> dict[str, Any]:
        """What SamplingParams has under the same name and in the same meaning."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name in SHARED}
        given = {name: value for name, value in given.items() if value is not None}
        if self.repetition_detection is not None:
            given["repetition_detection"] = msgspec.to_builtins(self.repetition_detection)
        return given


class _Request(Sampling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What completions of texts and of chats have."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None

    structured_outputs: StructuredOutputsParams | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream has one more chunk, with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self) -> dict[str, Any]:
        """SamplingParams but for ``logprobs`` and the kind's defaults; raises BodyError."""
        if self.stream_options is not None and not self.stream:
            raise BodyError("stream_options are for a stream: send stream: true, or leave them out", "stream_options")
        form = _form(self)
        return self._shared_params() | ({} if form is None else {"structured_outputs": form})


class ChatCompletionRequest(_Request, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None

    def question(self) -> Question:
        """What to ask our client; raises BodyError."""
        params = self._params()
        most = self.max_completion_tokens
        if most is not None and params.setdefault("max_tokens", most) != most:
            raise BodyError("max_tokens and max_completion_tokens differ: leave one of them out", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BodyError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.logprobs:
            params["logprobs"] = self.top_logprobs or 0
        use = self.tool_use()
        messages = [message.as_dict() for message in self.messages]
        switches = template_switches(self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message)
        return Question(None, messages, params, use.as_dict() if use else None, switches)

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
        params = {"max_tokens": DEFAULT_MAX_TOKENS} | self._params()
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
        prompts, n = self.prompts(), self.n or 1
        if len(prompts) * n > MAX_PROMPTS:
            why = f"a body may ask for {MAX_PROMPTS} completions, not {len(prompts)} prompts times n, which is {n}"
            raise BodyError(why, "prompt")
        return [Question(prompt, None, dict(params)) for prompt in prompts]

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


def _form(request: _Request) -> dict[str, Any] | None:
    """The form of the text, from any one of the fields that can set it."""
    said: dict[str, Any] = {
        name: {form: getattr(request, name)} for name, form in GUIDED.items() if getattr(request, name) is not None
    }
    if request.structured_outputs is not None:
        said["structured_outputs"] = msgspec.to_builtins(request.structured_outputs)
    if request.response_format is not None and request.response_format.type != "text":
        said["response_format"] = _json_form(request.response_format)
    if len(said) > 1:
        raise BodyError(f"{' and '.join(said)} each say the form of the text: leave all but one out", next(iter(said)))
    return next(iter(said.values()), None)


def _json_form(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.json_schema is None:
        raise BodyError("response_format of type json_schema needs a json_schema", "response_format")
    return {"json": asked.json_schema.schema}
