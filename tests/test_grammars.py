"""Grammars: what they allow, from the start and on the way, and what is refused."""

import msgspec
import numpy as np
import pytest
from grammar_constraints import ENDLESS, LIMITS, advance, allowed, begin, hear, running
from tokenizer_files import build_byte_level

from driver.errors import InternalError, InvalidRequest
from driver.grammars.compiler import LAST, GrammarCompiler, GrammarRefused, refused
from driver.grammars.matcher import Grammar, GrammarError, MaskedTokenizer
from driver.grammars.protocol import GrammarJob, TokenizerDefinition
from driver.text.json_schema import without_additional_properties
from engine.request_limits import MAX_CHOICES, MAX_ERROR_LENGTH, ServingLimits
from engine.structured_outputs import StructuredOutputsParams
from ipc.openai.structural_tag import TagStructure, tag_grammar


@pytest.fixture(scope="module")
def masked_tokenizer(tokenizer):
    """As a worker has it, but in this process."""
    return MaskedTokenizer(TokenizerDefinition(tokenizer.definition(), LIMITS.vocab_size, LIMITS.eos_token_ids))


def follows(masked_tokenizer, token_ids, **form):
    """Whether these tokens, and the end behind them, are of a form."""
    grammar = Grammar(masked_tokenizer, GrammarCompiler.job(StructuredOutputsParams(**form)))
    matcher, mask = grammar.begin(0), grammar.first_mask
    for token_id in [*token_ids, LIMITS.eos_token_ids[0]]:
        if mask is None:
            return token_id in LIMITS.eos_token_ids
        if not np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[token_id]:
            return False
        mask = matcher.advance([token_id])
    return True


def test_several_sequences_follow_one_grammar_each_for_itself(grammars, tokenizer, monkeypatch):
    """Compiled once, they begin alike, and one knows nothing of the other's tokens."""
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")

    left, right = begin(grammars, 2, regex="(ab|ba)+")
    assert allowed(left) == allowed(right)
    advance(left, a)
    advance(right, b)

    assert allowed(left) == [b] and a in allowed(right) and b not in allowed(right)
    monkeypatch.setattr(grammars, "compile", None)  # it is not compiled again
    assert begin(grammars, regex="(ab|ba)+")


def test_who_waits_has_no_matcher_and_goes_on_as_if_it_had(grammars, tokenizer):
    """Before its first token and while it is preempted: the tokens are told anew, and an answer is heard meanwhile."""
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    (constraint,) = begin(grammars, regex="ab(ab)*")

    assert constraint._worker is None
    advance(constraint, a)
    constraint.suspend()
    assert constraint._worker is None and allowed(constraint) == [b]
    constraint.advance(b)
    constraint.suspend()
    hear(constraint)
    assert constraint._worker is None and a in allowed(constraint) and b not in allowed(constraint)
    advance(constraint, a)
    assert constraint._worker is not None and allowed(constraint) == [b]


def test_a_sequence_that_has_tokens_has_the_mask_behind_them(grammars, tokenizer):
    """Or the end, or an error, of which the engine is told as of any other; and that without a matcher."""
    a, b, x = (tokenizer.encode(text)[0] for text in "abx")

    (going_on,) = begin(grammars, regex="aab", token_ids=(a, a))
    (complete,) = begin(grammars, regex="aab", token_ids=(a, a, b))
    (wrong,) = begin(grammars, regex="aab", token_ids=(x,))

    assert all(constraint.hear(set()) and constraint._worker is None for constraint in (going_on, complete, wrong))
    assert allowed(going_on) == [b] and complete.complete and wrong.error is not None
    advance(going_on, b)
    assert going_on.complete


def test_ids_that_no_tokenizer_knows_are_never_allowed(grammars):
    """A vocabulary that is padded to a round size."""
    (any_text,) = begin(grammars, regex="(.|\n)*")

    assert max(allowed(any_text)) < build_byte_level().get_vocab_size() and len(any_text.mask) == 13


def test_ids_that_the_model_lacks_are_never_allowed(tokenizer):
    """A tokenizer that has more of them; nor does the grammar force one."""
    a, fox, there, was = tokenizer.encode_word("a fox there was")
    masked = MaskedTokenizer(TokenizerDefinition(tokenizer.definition(), was, LIMITS.eos_token_ids))
    any_text, forced = (
        Grammar(masked, GrammarCompiler.job(StructuredOutputsParams(regex=regex)))
        for regex in ("(.|\n)*", "a fox there was")
    )

    assert np.unpackbits(np.frombuffer(any_text.first_mask, np.uint8), bitorder="little")[was:].sum() == 0
    assert forced.begin(2).look_ahead([])[:2] == ([a, fox, there], 3)


@pytest.mark.parametrize(("ends", "left"), [((0, 405), {0}), ((405,), set())])
def test_an_end_that_the_tokenizer_lacks_is_never_allowed(tokenizer, ends, left):
    """A list of a model with more ids may have such; the others end a text."""
    with running(tokenizer, msgspec.structs.replace(LIMITS, eos_token_ids=ends)) as grammars:
        (constraint,) = begin(grammars, regex="a*")
        advance(constraint, tokenizer.encode("a")[0])

        assert {*allowed(constraint)} & {0, 405} == left


def test_the_most_choices_that_may_be_given_can_be_followed(tokenizer, masked_tokenizer):
    """To the end of the last of them, and of one with which others begin; no other text is one."""
    choices = [f"choice {number}" for number in range(MAX_CHOICES)]

    for text, verdict in (("choice 4095", True), ("choice 40", True), ("choice 4096", False), ("choice ", False)):
        assert follows(masked_tokenizer, tokenizer.encode_word(text), choice=choices) is verdict


def test_a_choice_is_a_text_whatever_it_holds(tokenizer, masked_tokenizer):
    """Signs that mean something in a regex or in Lark's notation, and those that cannot be seen."""
    text = "".join(map(chr, range(1, 0x180))) + '\n// a\\\n%json {} "b" \u2028\ufeff😀'

    assert follows(masked_tokenizer, tokenizer.encode_word(text), choice=["b", text])
    assert not follows(masked_tokenizer, tokenizer.encode_word(text[:-1]), choice=["b", text])


def test_tags_are_texts_whatever_they_hold(tokenizer, masked_tokenizer):
    """As choices are."""
    begin, end = '<"\x7f\n\\😀>', "/\x7f\x00"
    grammar = tag_grammar([TagStructure(begin, {"type": "object"}, end)], ["<"])

    assert follows(masked_tokenizer, tokenizer.encode_word(f"a{begin}{{}}{end}b"), grammar=grammar)
    assert not follows(masked_tokenizer, tokenizer.encode_word(f"a{begin}b"), grammar=grammar)


@pytest.mark.parametrize(
    ("regex", "text"),
    [("a\\\nb", "a\nb"), ("(?x)a # c/d\n b", "ab"), ("a\nb/[/]\\/", "a\nb///"), ('"#', '"#')],
)
def test_a_regex_means_what_it_means_elsewhere(tokenizer, masked_tokenizer, regex, text):
    """Newlines and slashes, escaped or not, and comments."""
    assert follows(masked_tokenizer, tokenizer.encode_word(text), regex=regex)


def test_a_regex_that_ends_in_an_escape_is_refused(masked_tokenizer):
    """It would escape what is written behind it."""
    with pytest.raises(GrammarError, match="it ends in a backslash"):
        follows(masked_tokenizer, [], regex="a\\")


def test_a_model_without_an_end_ends_where_its_text_is_complete(tokenizer):
    """No token says so, and none is needed."""
    (a,) = tokenizer.encode("a")

    with running(tokenizer, ServingLimits(64, 410, ())) as grammars:
        (constraint,) = begin(grammars, regex="a")
        assert allowed(constraint) == [a]
        advance(constraint, a)

        assert constraint.complete
        with pytest.raises(GrammarRefused, match="no text but the empty one"):
            begin(grammars, regex="()")


def test_a_token_that_the_grammar_does_not_allow_is_an_error(grammars, tokenizer):
    """Nothing goes on from there."""
    (constraint,) = begin(grammars, regex="[ab]+")

    advance(constraint, tokenizer.encode("x")[0])

    assert constraint.error is not None and constraint.error.startswith("structured_outputs: ")


def test_an_error_that_quotes_the_grammar_is_cut_in_its_middle(grammars):
    """Once, with its true length: the grammar is quoted twice."""
    params = StructuredOutputsParams(grammar="start: /(" + 600 * "a" + "/")

    with pytest.raises(GrammarRefused) as caught:
        grammars.compile(grammars.job(params), LAST)
    error = str(refused(params, caught.value))

    assert error.startswith("structured_outputs.grammar: at 1(8): invalid regex") and error.rstrip().endswith("^")
    assert len(error) == MAX_ERROR_LENGTH and int(error.split("[... ")[1].split()[0].replace(",", "")) > 1200


def test_a_tokenizer_that_cannot_be_followed_is_our_error(tokenizer, monkeypatch, capfd):
    """The client has done nothing wrong."""
    monkeypatch.setattr(tokenizer, "definition", lambda: "{}")

    with running(tokenizer) as grammars, pytest.raises(InternalError, match="the daemon's log says why"):
        begin(grammars, regex="a")

    assert "Traceback" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_grammar_that_takes_too_long_is_refused(grammars):
    """An intersection that would take minutes; lower tiers have no time for it at all."""
    job = grammars.job(StructuredOutputsParams(grammar=ENDLESS))

    assert grammars.compile(job, 0) is grammars.compile(job, 1) is None
    with pytest.raises(GrammarRefused, match="cannot be compiled within 5 seconds"):
        grammars.compile(job, LAST)


@pytest.mark.parametrize("unit", ["[", '["', '["y"', '"\\', '"/[', "[/", "<", "temperature ", '"<"|/'])
def test_a_search_for_what_is_not_honoured_takes_no_time(unit):
    """Tens of thousands of signs are looked at once."""
    job = GrammarCompiler.job(StructuredOutputsParams(grammar="start: " + (unit * 60000)[:60000]))

    assert msgspec.msgpack.decode(job, type=GrammarJob).kind == "lark"


@pytest.mark.parametrize(
    "attributes",
    [
        *("temperature=0", "lazy, temperature = 0.5", 'stop="y", temperature=1', r'stop=/[\/"]/, temperature=1'),
        *(r'suffix="\"#[", temperature=1', "stop=<|a|>, temperature=1", '\n# "\ntemperature=1', "// /\ntemperature=1"),
    ],
)
def test_a_temperature_of_a_rule_is_refused(attributes):
    """Wherever it stands among the rule's attributes."""
    with pytest.raises(InvalidRequest, match="a rule cannot have a temperature"):
        GrammarCompiler.job(StructuredOutputsParams(grammar=f'start: <|"|> a "\\"" /"/\na[{attributes}]: /x+/'))


@pytest.mark.parametrize(
    "rule", ['"[temperature=1]"', "/[temperature=1]/", "a # [temperature=1]", '%json {"[temperature=": {}}']
)
def test_what_looks_like_a_temperature_is_none(rule):
    """In a string, a regex, a comment or a schema."""
    assert GrammarCompiler.job(StructuredOutputsParams(grammar=f"start: {rule}"))


def test_only_schemas_are_closed():
    """Not what merely looks like one: a property called properties, a constant."""
    looks_like_one = {"properties": {"x": 1}}
    schema = {
        "type": "object",
        "properties": {
            "properties": {"properties": {"y": True}},
            "open": {"properties": {}, "additionalProperties": True},
        },
        "items": [{"patternProperties": {}}],
        "anyOf": [{"not": {"properties": {}}}, {"const": looks_like_one, "enum": [looks_like_one]}],
    }

    assert without_additional_properties(schema) == {
        "type": "object",
        "properties": {
            "properties": {"properties": {"y": True}, "additionalProperties": False},
            "open": {"properties": {}, "additionalProperties": True},
        },
        "items": [{"patternProperties": {}, "additionalProperties": False}],
        "anyOf": [
            {"not": {"properties": {}, "additionalProperties": False}},
            {"const": looks_like_one, "enum": [looks_like_one]},
        ],
        "additionalProperties": False,
    }
