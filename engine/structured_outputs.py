"""The format of a completion's text, by vLLM's names."""

from typing import Any

import msgspec

from engine.request_limits import MAX_CHOICES

FORMS = ("json", "json_object", "regex", "choice", "grammar")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Exactly one of ``json`` (a JSON schema, or its text), ``json_object`` (true: any object),
    ``regex`` (matches the whole text), ``choice`` (the text is one of them) and ``grammar`` (in
    Lark's notation, as llguidance reads it).

    The others are for JSON. ``whitespace_pattern`` is a regex of whitespace around punctuation,
    which ``disable_any_whitespace`` forbids. ``disable_additional_properties`` limits an object to
    its schema's properties, unless the schema allows others. Raises ValueError, without compiling.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        _require(len(given) == 1, "", f"exactly one of {', '.join(FORMS)}", " and ".join(given) or "none")
        _require(self.json_object is not False, "json_object", "true, or left out", "false")
        for name in ("json", "regex", "grammar"):
            _require(getattr(self, name) not in ("", {}), name, "more than nothing", "empty")
        self._check_choice()
        options = [name for name in JSON_OPTIONS if getattr(self, name) not in (False, None)]
        _require(self.is_json or not options, ", ".join(options), "left out where there is no json", "given")
        both = self.disable_any_whitespace and self.whitespace_pattern is not None
        _require(not both, "whitespace_pattern", "left out where disable_any_whitespace allows none", "given")

    @property
    def form(self) -> str:
        """The name of the field that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def is_json(self) -> bool:
        """Whether the text must be JSON."""
        return self.form in ("json", "json_object")

    def _check_choice(self) -> None:
        choices = self.choice
        if choices is not None:
            _require(1 <= len(choices) <= MAX_CHOICES, "choice", f"from 1 to {MAX_CHOICES} strings", str(len(choices)))
            _require(all(choices), "choice", "strings of at least 1 character", "empty ones")


def _require(holds: bool, name: str, allowed: str, given: str) -> None:
    if not holds:
        where = f"structured_outputs.{name}" if name else "structured_outputs"
        raise ValueError(f"{where} must be {allowed}, not {given}")
