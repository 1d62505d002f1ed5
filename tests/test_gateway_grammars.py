"""The grammars by which answers are held to calls, and to forms behind thoughts, as llguidance follows them."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizer_files import build_byte_level
from tokenizers import AddedToken, Tokenizer

from ipc.gateway.endpoints.answering import Answering
from ipc.gateway.output.dialect import Dialect
from ipc.gateway.output.reasoning import REASONING_FORMATS
from ipc.gateway.output.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, ToolFormat
from ipc.openai.chat_tools import Function, ToolUse
from ipc.openai.request_bodies import BodyError

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
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
    end = tokenizer.token_to_id("<|end|>")
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


def written(row: ToolFormat, *calls: tuple[str, str]) -> str:
    """Calls as this format has them."""
    texts = [row.call[0] + name + row.call[1] + arguments + row.call[2] for name, arguments in calls]
    return row.between.join(texts).join(row.around)


@pytest.mark.parametrize("row", [HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS])
@pytest.mark.parametrize("with_marks", [True, False])
def test_what_must_be_called_is(row: ToolFormat, with_marks: bool) -> None:
    """In the format's own words, by the schema; once or several times, and nothing else."""
    several = build_answering(row, ToolUse([ADD, NOW], [ADD, NOW], parallel=True), with_marks=with_marks)
    once = build_answering(row, ToolUse([ADD, NOW], [ADD], parallel=False), with_marks=with_marks)
    one, two = written(row, ("add", '{"a": 1}')), written(row, ("add", '{"a": 1}'), ("now", "{}"))

    def verdicts(answering: Answering, *texts: str) -> list[bool]:
        return [follows(answering, text, with_marks=with_marks) for text in texts]

    wrong = [written(row, ("add", '{"a": "1"}')), written(row, ("sub", "{}")), "No.", "", f"Well. {one}"]
    assert verdicts(several, one, two, *wrong) == [True, True, False, False, False, False, False]
    assert verdicts(once, one, two, written(row, ("now", "{}"))) == [True, False, False]


@pytest.mark.parametrize("row", [HERMES, LLAMA3_JSON, MISTRAL])
def test_what_is_strict_is_called_by_its_schema_or_not_at_all(row: ToolFormat) -> None:
    """Anything else may be said."""
    answering = build_answering(row, ToolUse([ADD], [], parallel=True))
    wrong, right = written(row, ("add", "{}")), written(row, ("add", '{"a": 1}'))

    assert [follows(answering, text) for text in (right, wrong, "No, {} it is.", "")] == [True, False, True, True]
    with pytest.raises(BodyError, match="strict is not supported by this model"):
        build_answering(HERMES, ToolUse([ADD], [], parallel=True), with_marks=False).params({})


def test_a_form_or_a_call_is_what_is_answered() -> None:
    """Where both are asked for."""
    answering = build_answering(HERMES, ToolUse([NOW], [], parallel=True))
    verdicts = [follows(answering, text, {"regex": "[0-9]+"}) for text in ("42", written(HERMES, ("now", "{}")), "No.")]

    assert verdicts == [True, True, False]


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": NUMBER, "disable_any_whitespace": True}, '{"a":1}', '{"a": 1}'),
    ({"json": '{"type": "integer"}'}, "12", "a"),
    ({"json": NUMBER, "disable_additional_properties": True}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"json_object": True}, '{"x": []}', "[]"),
    ({"regex": r"[0-9]/\/\n?"}, "1//\n", "1/"),
    ({"choice": ['"yes"', "no\n"]}, '"yes"', "yes"),
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


@pytest.mark.parametrize("asked", [{"json": "{"}, {"json": "[1]"}, {"regex": ""}, {"xml": "a"}])
def test_what_is_no_form_is_refused(asked: dict[str, Any]) -> None:
    """Before the daemon hears of it."""
    with pytest.raises(BodyError):
        build_answering(opened=True).params({"structured_outputs": asked})
