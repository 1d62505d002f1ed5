"""Functions that a model may call, and calls of them, as OpenAI's chat API has them."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

FunctionName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,128}\Z")]


class Function(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``parameters`` is a JSON schema of an object, or None; with ``strict`` calls keep to it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be called; ``cache_control`` changes nothing, as in a message."""

    function: Function
    type: Literal["function"] = "function"
    cache_control: dict[str, Any] | None = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the functions."""

    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""Whether a function is called: never, as the model likes, at least one, or this one."""


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    """``arguments`` is the text of a JSON object, or whatever the model wrote in its place."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call; its result refers to its ``id``. ``index`` is its place in a stream, if it came in one."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType | None = UNSET

    def as_dict(self) -> dict[str, Any]:
        """As our client takes it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolUse(NamedTuple):
    """What may be called in an answer, and what must be: one of ``forced``, if there is any, and
    no others then.

    Without ``parallel`` there is one call at most. ``field`` is where the body has a function's
    schema, by its place among them.
    """

    functions: list[Function]
    forced: list[Function]
    parallel: bool
    field: str = "tools[{}].function.parameters"

    def as_dict(self) -> list[dict[str, Any]]:
        """The functions as our client takes them."""
        return [{"type": "function", "function": msgspec.to_builtins(function)} for function in self.functions]

    @property
    def callable(self) -> list[Function]:
        """The functions that may be called."""
        return self.forced or self.functions

    @property
    def schema_fields(self) -> list[str]:
        """Where the body has the schema of each of those."""
        return [self.field.format(self.functions.index(function)) for function in self.callable]

    @property
    def strict(self) -> bool:
        """Whether calls must keep to their schemas though none is forced."""
        return any(function.strict for function in self.functions)
