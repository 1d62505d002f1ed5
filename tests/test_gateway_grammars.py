"""The grammars by which answers are held to calls, and to forms behind thoughts, as llguidance follows them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizer_files import build_byte_level
from tokenizers import AddedToken, Tokenizer
from written_calls import written

from engine.request_limits import MAX_CHOICES
from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.output import tool_grammar
from ipc.gateway.output.call_format import ToolFormat
from ipc.gateway.output.dialect import Dialect
from ipc.gateway.output.json_formats import HARMONY, HERMES
from ipc.gateway.output.output_parser import whole_output
from ipc.gateway.output.reasoning import REASONING_FORMATS
from ipc.gateway.output.tool_formats import GEMMA4, PYTHONIC, QWEN3_CODER, TOOL_FORMATS
from ipc.openai.chat_tools import Function, ToolUse
from ipc.openai.question import BodyError

ROWS = {f"{name}-{place}": row for name, rows in TOOL_FORMATS.items() for place, row in enumerate(rows)}
MARKS = ["<think>", "</think>", *sorted({token for row in ROWS.values() for token in row.tokens})]
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD, NOW = Function("add", parameters=NUMBER, strict=True), Function("now")


def build_tokenizer(*, with_marks: bool) -> Tokenizer:
    """A tokenizer in which each mark is a token, or none is."""
    tokenizer = build_byte_level()
    if with_marks:
        tokenizer.add_tokens([AddedToken(mark, special=mark.startswith("[")) for mark in MARKS])
    return tokenizer


TOKENIZERS = {with_marks: build_tokenizer(with_marks=with_marks) for with_marks in (True, False)}


def follows(answering: Answering, text: str, asked: dict[str, Any] | None = None, *, with_marks: bool = True) -> bool:
    """Whether a model may answer this, and end there."""
    tokenizer = TOKENIZERS[with_marks]
    params = answering.params({} if asked is None else {"structured_outputs": asked})
    grammar = LLMatcher.grammar_from_lark(params["structured_outputs"]["grammar"])
    end = tokenizer.token_to_id("<|assistant|>")
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=[end]), grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens([*token_ids, end]) == len(token_ids) + 1


def build_answering(
    tools: ToolFormat | None = None, use: ToolUse | None = None, *, opened: bool | None = False, with_marks: bool = True
) -> Answering:
    """For a model that does not think, unless said otherwise."""
    token_ids = {mark: TOKENIZERS[True].token_to_id(mark) for mark in MARKS} if with_marks else {}
    return Answering(Dialect(tools, REASONING_FORMATS["qwen3"], token_ids), opened, use)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("with_marks", [True, False])
def test_what_must_be_called_is(row: ToolFormat, with_marks: bool) -> None:
    """In the format's own words, by the schema; once or several times, and nothing else."""
    several = build_answering(row, ToolUse([ADD, NOW], [ADD, NOW], parallel=True), with_marks=with_marks)
    once = build_answering(row, ToolUse([ADD, NOW], [ADD], parallel=False), with_marks=with_marks)
    one, two = written(row, ("add", {"a": 1})), written(row, ("add", {"a": 1}), ("now", {}))

    def verdicts(answering: Answering, *texts: str) -> list[bool]:
        return [follows(answering, text, with_marks=with_marks) for text in texts]

    wrong = [written(row, ("add", {"a": "x"})), written(row, ("sub", {})), "No.", "", f"Well. {one}"]
    assert verdicts(several, one, two, *wrong) == [True, row is not HARMONY, False, False, False, False, False]
    assert verdicts(once, one, two, written(row, ("now", {}))) == [True, False, False]


FULL = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "any": {}},
    "required": ["city", "unit"],
}


@pytest.mark.parametrize(
    "row",
    [HERMES, QWEN3_CODER, PYTHONIC, GEMMA4, *(TOOL_FORMATS[name][0] for name in ("glm45", "hy_v3", "mimo", "apertus"))],
)
@pytest.mark.parametrize("with_marks", [True, False])
def test_parameters_keep_to_the_schema(row: ToolFormat, with_marks: bool) -> None:
    """Those that are required are there, others may be; each is of its kind, in the schema's order."""
    forecast = Function("forecast", parameters=FULL)
    answering = build_answering(row, ToolUse([forecast], [forecast], parallel=False), with_marks=with_marks)
    right = [
        {"city": "a<b", "unit": "C"},
        {"city": "", "days": 3, "unit": "F"},
        {"city": "x\ny", "unit": "C", "any": [1]},
    ]
    wrong = [{"city": "a"}, {"days": 3, "unit": "C"}, {"city": "a", "days": "many", "unit": "C"}, {}]
    wrong += [{"city": "a", "unit": "K"}]

    def verdicts(cases: list[dict[str, Any]]) -> list[bool]:
        texts = [written(row, ("forecast", case)).replace("'", '"') for case in cases]
        return [follows(answering, text, with_marks=with_marks) for text in texts]

    assert verdicts(right) == [True] * len(right)
    assert verdicts(wrong) == [False] * len(wrong)


@pytest.mark.parametrize("row", [QWEN3_CODER, GEMMA4])
def test_a_parameter_may_be_one_of_many_words(row: ToolFormat) -> None:
    """Of which one may be empty."""
    words = ["", *(f"word {number}" for number in range(4000))]
    parameters = {"type": "object", "properties": {"word": {"enum": words}}, "required": ["word"]}
    say = Function("say", parameters=parameters)
    answering = build_answering(row, ToolUse([say], [say], parallel=False))

    verdicts = [follows(answering, written(row, ("say", {"word": word}))) for word in ("", "word 3999", "word 4000")]

    assert verdicts == [True, True, False]


UNITS = {
    "listed": {"enum": ["C", "F"]},
    "by name": {"$ref": "#/$defs/Unit"},
    "with a default": {"allOf": [{"$ref": "#/$defs/Unit"}], "default": "C"},
    "optional": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
    "one of two constants": {"oneOf": [{"const": "C"}, {"const": "F"}, {"enum": [1, None]}]},
    "as another": {"$ref": "#/properties/first"},
}


@pytest.mark.parametrize("row", [QWEN3_CODER, PYTHONIC, GEMMA4, TOOL_FORMATS["glm45"][0]])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_values_are_those_that_a_schema_lists_wherever_it_lists_them(row: ToolFormat, unit: dict[str, Any]) -> None:
    """As pydantic and zod write an enumeration, a default and an optional one."""
    defs = {"Unit": {"enum": ["C", "F"], "type": "string"}}
    properties = {"first": {"$ref": "#/$defs/Unit"}, "unit": unit}
    parameters = {"type": "object", "properties": properties, "required": ["unit"], "$defs": defs}
    f = Function("f", parameters=parameters)
    answering = build_answering(row, ToolUse([f], [f], parallel=False))
    values = ["C", "F", "K", None, 1, 2]

    verdicts = {
        value: follows(answering, written(row, ("f", {"unit": value})).replace("'", '"').replace("None", "null"))
        for value in values
    }

    others = {None: "null" in str(unit) or "None" in str(unit), 1: "[1" in str(unit), 2: False}
    assert verdicts == {"C": True, "F": True, "K": False, **others}


@pytest.mark.parametrize("row", [QWEN3_CODER, PYTHONIC, GEMMA4])
def test_values_are_those_of_any_part_of_a_schema_and_may_be_objects(row: ToolFormat) -> None:
    """An enumeration behind a type, and listed objects and lists, each in the format's notation."""
    values = ["all", {"x_y": [1, None], "z": "C"}, [], True]
    sort = {"allOf": [{"description": "how", "type": ["string", "object", "array", "boolean"]}, {"enum": values}]}
    f = Function("f", parameters={"type": "object", "properties": {"sort": sort}, "required": ["sort"]})
    answering = build_answering(row, ToolUse([f], [f], parallel=False))

    def verdict(value: Any) -> bool:
        text = written(row, ("f", {"sort": value}))
        return follows(answering, text.replace("'", '"').replace("None", "null").replace("=True", "=true"))

    assert [verdict(value) for value in values] == [True] * len(values)
    assert not any(verdict(value) for value in ("any", {"z": "C"}, [1], False, "C"))


NOTATIONS = [QWEN3_CODER, PYTHONIC, GEMMA4]
"""In which each parameter is written by itself."""


@pytest.mark.parametrize("row", [HERMES, *NOTATIONS])
@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/definitions/F", "definitions": {"F": {"type": "object", **NUMBER}}},
        {"allOf": [NUMBER, {"properties": {"b": {"type": "integer"}}}]},
        {"type": "object", "required": ["a"], "allOf": [{"properties": {"a": {"type": "integer"}}}]},
    ],
)
def test_parameters_may_stand_elsewhere_in_the_schema(row: ToolFormat, parameters: dict[str, Any]) -> None:
    """In what the schema refers to, and in each of its parts."""
    f = Function("f", parameters=parameters)
    answering = build_answering(row, ToolUse([f], [f], parallel=False))

    assert [follows(answering, written(row, ("f", case))) for case in ({"a": 1}, {})] == [True, False]


def test_a_parameter_may_hold_what_the_whole_schema_is() -> None:
    """A reference to the root is one to the function's schema, not to the parameter's own."""
    root = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
    f = Function("f", parameters=root)
    answering = build_answering(PYTHONIC, ToolUse([f], [f], parallel=False))
    texts = [
        "[f(v=1)]",
        '[f(v=1, next={"v": 2, "next": {"v": 3}})]',
        '[f(v=1, next={"next": 1})]',
        '[f(v=1, next="x")]',
    ]

    assert [follows(answering, text) for text in texts] == [True, True, False, False]


@pytest.mark.parametrize("row", NOTATIONS)
@pytest.mark.parametrize("keyword", ["anyOf", "minProperties", "dependentRequired"])
def test_what_parameters_cannot_be_held_to_one_by_one_is_refused(row: ToolFormat, keyword: str) -> None:
    """By the keyword, also where the function's schema refers to it."""
    whole = {**NUMBER, keyword: {"anyOf": [{"required": ["a"]}], "minProperties": 1}.get(keyword, {"a": []})}
    for parameters in (whole, {"$ref": "#/$defs/F", "$defs": {"F": whole}}):
        f = Function("f", parameters=parameters)

        with pytest.raises(BodyError, match=f"tools: f has {keyword} beside its properties"):
            build_answering(row, ToolUse([f], [f], parallel=False)).params({})


@pytest.mark.parametrize("row", NOTATIONS)
def test_a_function_that_is_not_strict_may_say_what_it_likes_beside_one_that_is(row: ToolFormat) -> None:
    """Its calls are held to its parameters one by one, unless one must be made."""
    free = Function("f", parameters={**NUMBER, "anyOf": [{"required": ["a"]}]})
    strict = Function("g", parameters=NUMBER, strict=True)
    answering = build_answering(row, ToolUse([free, strict], [], parallel=False))

    assert [follows(answering, written(row, (name, {"a": 1}))) for name in "fg"] == [True, True]
    with pytest.raises(BodyError, match="tools: f has anyOf beside its properties"):
        build_answering(row, ToolUse([free, strict], [free], parallel=False)).params({})


NAMES = ["a-b.c", "$filter", "@type", "my param", "2fa", "12", "é", "\"\\x'", "x/y", "=:,"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (PYTHONIC, "[1-f.({})]"),
        (TOOL_FORMATS["olmo3"][0], "<function_calls>1-f.({})</function_calls>"),
        (GEMMA4, "<|tool_call>call:1-f.{{{}}}<tool_call|>"),
    ],
)
def test_names_of_any_letters_are_written_as_they_are_read(row: ToolFormat, text: str) -> None:
    """In quotes where they are no names in the notation."""
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in NAMES}, "required": NAMES}
    function = Function("1-f.", parameters=parameters)
    answering = build_answering(row, ToolUse([function], [function], parallel=False))
    between, comma = (":", ",") if row is GEMMA4 else ("=", ", ")
    bare, quotes = NAMES[:3], '<|"|>{}<|"|>' if row is GEMMA4 else "{}"
    quoted = [quotes.format(name if row is GEMMA4 else json.dumps(name, ensure_ascii=False)) for name in NAMES[3:]]
    written_out = text.format(comma.join(f"{key}{between}1" for key in [*bare, *quoted]))

    assert follows(answering, written_out)
    [call] = whole_output(answering.parser(), written_out, "stop").calls
    assert (call[0], json.loads(call[1])) == ("1-f.", dict.fromkeys(NAMES, 1))


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.tags is not None])
@pytest.mark.parametrize("name", ["a<b", "", " a", "x" * 257])
def test_a_parameter_that_a_format_cannot_name_is_refused(row: ToolFormat, name: str) -> None:
    """Its value would be lost."""
    function = Function("f", parameters={"properties": {"fine": {}, name: {"type": "integer"}}})

    with pytest.raises(BodyError, match="which this model's format of calls cannot name"):
        build_answering(row, ToolUse([function], [function], parallel=False)).params({})


def test_no_more_rules_are_made_than_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema's definitions stand beside each parameter: together they may be far more than the schema."""
    made: list[int] = []
    json_of = tool_grammar.json_of
    monkeypatch.setattr(tool_grammar, "json_of", lambda *given: (made.append(1), json_of(*given))[1])
    properties = {f"p{number}": {"type": "integer"} for number in range(200)}
    large = Function("f", parameters={"properties": properties, "$defs": {"x": {"description": "x" * 10_000}}})
    answering = build_answering(QWEN3_CODER, ToolUse([large], [large], parallel=False))

    with pytest.raises(BodyError, match="their schemas are too large"):
        answering.params({})

    assert len(made) < 10


STRICT = {name: row for name, row in ROWS.items() if row is not HARMONY}
"""Of the other, ``test_messages_of_gpt_oss_are_held_to_their_channels`` tells."""


@pytest.mark.parametrize("row", STRICT.values(), ids=STRICT)
@pytest.mark.parametrize("with_marks", [True, False])
def test_what_is_strict_is_called_by_its_schema_or_not_at_all(row: ToolFormat, with_marks: bool) -> None:
    """Anything else may be said, before calls as well where they have a mark."""
    answering = build_answering(row, ToolUse([ADD], [], parallel=True), with_marks=with_marks)
    one, two = ("add", {"a": 1}), ("add", {"a": 2})
    wrong, right = written(row, ("add", {})), [written(row, one), written(row, one, two)]
    free = ["No, {} it is.", "", f"It is {row.marker[:-1]}, or not."]

    def verdicts(texts: list[str]) -> list[bool]:
        return [follows(answering, text, with_marks=with_marks) for text in texts]

    assert verdicts([*right, *free]) == [True] * 5
    assert verdicts([wrong, f"Well. {row.marker}{{}}", right[0] + wrong]) == [False] * 3
    if not row.bare:
        assert verdicts([f"Well.\n{right[0]}", f"Well.\n{wrong}"]) == [True, False]


@pytest.mark.parametrize("row", [HERMES, QWEN3_CODER])
def test_a_record_of_zods_may_be_an_argument(row: ToolFormat) -> None:
    """Its names may be any, which llguidance would not be told."""
    add = Function("add", parameters={"properties": {"a": RECORD}, "required": ["a"]})
    answering = build_answering(row, ToolUse([add], [add], parallel=True))

    assert [follows(answering, written(row, ("add", {"a": value}))) for value in ({"x y": 1}, {"x": "y"})] == [
        True,
        False,
    ]


def test_a_form_or_a_call_is_what_is_answered() -> None:
    """Where both are asked for."""
    answering = build_answering(HERMES, ToolUse([NOW], [], parallel=True))
    verdicts = [follows(answering, text, {"regex": "[0-9]+"}) for text in ("42", written(HERMES, ("now", {})), "No.")]

    assert verdicts == [True, True, False]


RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
"""As zod writes one of numbers."""

FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": NUMBER, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
    ({"json": '{"type": "integer"}'}, "12", "a"),
    ({"json": NUMBER}, '{\r\n\n\t\t"a" : 1\n}', '{"a":  1}'),
    ({"json": {**NUMBER, "x-guidance": {"whitespace_pattern": "_"}}}, '{"a":_1}', '{"a": 1}'),
    ({"json": NUMBER, "disable_additional_properties": True}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"json": {"properties": {"r": RECORD}, "required": ["r"]}}, '{"r": {"x y": 1}}', '{"r": {"x": "y"}}'),
    ({"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}}, "[1, 1]", '["x"]'),
    ({"json": {"type": "object", "minProperties": 0, "dependentRequired": {}, "dependentSchemas": {}}}, "{}", "[]"),
    ({"json": {"enum": [RECORD]}, "disable_any_whitespace": True}, json.dumps(RECORD, separators=(",", ":")), "{}"),
    ({"json_object": True}, '{"x": []}', "[]"),
    ({"json": {"x-guidance": {"item_separator": ";"}}, "disable_any_whitespace": True}, "[1;2]", "[1, 2]"),
    ({"regex": r"[0-9]/\/\n?"}, "1//\n", "1/"),
    ({"regex": "(?x)[0-9] # c/d\n a\\\nb"}, "1a\nb", "1anb"),
    ({"choice": ['"yes"', "no\n"]}, '"yes"', "yes"),
    ({"choice": [f"choice {number}" for number in range(MAX_CHOICES)]}, "choice 4095", "choice 4096"),
    ({"grammar": 'start: "a" b\nb: "}"+'}, "a}}", "a"),
]


@pytest.mark.parametrize(("asked", "good", "bad"), FORMS)
@pytest.mark.parametrize("with_marks", [True, False])
def test_a_form_is_kept_to_behind_the_thoughts(asked: dict[str, Any], good: str, bad: str, with_marks: bool) -> None:
    """Of which there are some, or none where the prompt has not begun them."""
    begun, free = (build_answering(opened=opened, with_marks=with_marks) for opened in (True, None))

    for text, verdict in ((good, True), (bad, False)):
        assert follows(begun, f"Hm. {bad}\n</think>\n\n{text}", asked, with_marks=with_marks) == verdict
        assert follows(free, f"<think>\n{bad}</think>{text}", asked, with_marks=with_marks) == verdict
        assert follows(free, text, asked, with_marks=with_marks) == verdict
    assert not follows(begun, good, asked, with_marks=with_marks)


def test_without_thoughts_and_tools_a_form_is_as_it_was() -> None:
    """Nothing is put around it."""
    assert build_answering().params({"structured_outputs": {"regex": "a"}}) == {"structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    "asked",
    [
        *({"json": "{"}, {"json": "[1]"}, {"json": "true"}, {"json": '{"a":' * 5000 + "1" + "}" * 5000}),
        *({"regex": ""}, {"regex": "a\\"}, {"xml": "a"}),
    ],
)
def test_what_is_no_form_is_refused(asked: dict[str, Any]) -> None:
    """Before the daemon hears of it."""
    with pytest.raises(BodyError):
        build_answering(opened=True).params({"structured_outputs": asked})


def test_messages_of_gpt_oss_are_held_to_their_channels() -> None:
    """A call or content of a form, each behind its own header, after some analysis or none."""
    dialect = Dialect(
        HARMONY, REASONING_FORMATS["openai_gptoss"], {mark: TOKENIZERS[True].token_to_id(mark) for mark in MARKS}
    )
    forced, free = (Answering(dialect, None, ToolUse([ADD], use, parallel=True)) for use in ([ADD], []))
    thinks, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>"
    call, wrong = (written(HARMONY, ("add", {"a": value})) for value in (1, "x"))

    assert [follows(forced, text) for text in (call, thinks + call, final + "No.", wrong)] == [True, True, False, False]
    assert [follows(free, text) for text in (call, thinks + call, final + "No.", wrong)] == [True, True, True, False]
    assert [
        follows(free, text, {"regex": "[0-9]"}) for text in (final + "1", thinks + final + "2", final + "a", "3")
    ] == [
        *(True, True),
        *(False, False),
    ]


def test_content_between_marks_is_held_to_its_form() -> None:
    """Cohere's responses, also behind thoughts that the prompt has ended."""
    marks = ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"]
    for opened, start in ((None, ""), (False, ""), (None, "<|START_THINKING|>Hm.<|END_THINKING|>")):
        answering = Answering(Dialect(TOOL_FORMATS["cohere"][0], REASONING_FORMATS["cohere"], {}), opened, None)

        assert follows(answering, start + "1".join(marks[:2]), {"regex": "[0-9]"}, with_marks=False)
        assert not follows(answering, start + "a".join(marks[:2]), {"regex": "[0-9]"}, with_marks=False)
        assert answering.params({})["skip_special_tokens"] is False


def test_content_between_messages_ends_without_a_mark() -> None:
    """Solar Open's, whose mark behind content begins what follows it."""
    row = TOOL_FORMATS["solar_open"][0]
    token_ids = {mark: TOKENIZERS[True].token_to_id(mark) for mark in MARKS}
    dialect = Dialect(row, REASONING_FORMATS["solar_open"], token_ids)
    form, calls = Answering(dialect, None, None), Answering(dialect, None, ToolUse([NOW], [NOW], parallel=False))
    digit = {"regex": "[0-9]"}

    for start in ("", "<|think|>Hm.<|end|><|begin|>assistant"):
        assert follows(form, f"{start}<|content|>1", digit)
        assert not follows(form, f"{start}<|content|>1<|end|><|begin|>assistant", digit)
        assert follows(calls, start + written(row, ("now", {})))
