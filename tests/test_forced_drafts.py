"""What a grammar forces is drafted: how many steps that takes, and which masks the drafts have."""

import json
import random
from collections import deque
from itertools import takewhile

import numpy as np
import pytest
from random_grammars import random_regex, random_schema
from test_constrained_engine import Constraint
from test_scheduler import build_scheduler, build_sequence
from tokenizer_files import build_byte_level

from driver.grammars import matcher as grammar_matcher
from driver.grammars.compiler import GrammarCompiler
from driver.grammars.matcher import Grammar, GrammarError, MaskedTokenizer, Matcher
from driver.grammars.protocol import TokenizerDefinition, WayOn, pack, unpack_way_on
from engine.scheduling.plan import StepResult
from engine.scheduling.sequence import SequenceStatus
from engine.scheduling.speculation import Speculation
from engine.structured_outputs import StructuredOutputsParams

MOST_DRAFTS, VOCAB_SIZE, EOS = 4, 410, 0
PERSON = {
    "type": "object",
    "properties": {"identification_number": {"type": "integer"}, "place_of_residence": {"enum": ["here", "there"]}},
    "required": ["identification_number", "place_of_residence"],
    "additionalProperties": False,
}


class Forcing(Constraint):
    """Forces a text up to its next token that is free: each tenth one."""

    def __init__(self, text):
        super().__init__(length=len(text), at_once=True)
        self._text = text
        self._force()

    def hear(self, received):
        heard = super().hear(received)
        self._force()
        return heard

    def _force(self):
        begin = len(self.tokens)
        self.expected = self._text[begin : -(-begin // 10) * 10][: 2 * MOST_DRAFTS + 1]
        self.expected_masks = [self.mask] * min(MOST_DRAFTS, len(self.expected))
        self.num_forced = len(self.expected)


def steps_taken(run_ahead, text):
    """Steps until a sequence with this output, which its constraint forces, has ended."""
    scheduler, _ = build_scheduler(num_pages=1000, speculation=Speculation(MOST_DRAFTS))
    row = build_sequence("row", 3, 2 * len(text))
    row.constraint = Forcing(text)
    scheduler.add(row)
    in_flight, steps = deque(), 0
    while row.status is not SequenceStatus.FINISHED:
        if row.awaits_mask and row.constraint.hear(set()):
            scheduler.resume(row)
            in_flight += scheduler.plan_late()
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(plan)
            steps += 1
        while sum(each.samples_of is None for each in in_flight) > (run_ahead if plan else 0) or (
            in_flight and in_flight[0].samples_of
        ):
            _land(scheduler, in_flight.popleft(), row, text)
        scheduler.check_integrity()
    assert row.output_token_ids == text
    return steps


def _land(scheduler, plan, row, text):
    """The tokens that a row gives, as ``verify`` accepts them."""
    given = len(row.output_token_ids)
    tokens = [[] for _ in plan.sequences]
    if plan.samples and plan.samples[0]:
        pairs = zip(plan.expected.get(0, ()), text[given:], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tokens[0] = text[given : given + 1 + accepted]
    scheduler.update(plan, StepResult(tokens, drafts=[0] * plan.num_rows))


@pytest.mark.parametrize(("run_ahead", "most"), [(0, 22), (1, 33), (2, 52), (3, 62)])
def test_a_text_of_which_little_is_free_takes_few_steps(run_ahead, most):
    """A hundred tokens of which ten are free. Without run-ahead the drafts behind a token are in the next step; with one step of
    it they are in the one after that, which goes on where the step before is not read yet."""
    assert steps_taken(run_ahead, [1 + index % 7 for index in range(100)]) <= most


@pytest.fixture(scope="module")
def masked_tokenizer():
    """Of byte-level tokens."""
    return MaskedTokenizer(TokenizerDefinition(build_byte_level().to_str(), VOCAB_SIZE, (EOS,)))


def build_grammar(tokenizer, form, **options):
    """A compiled grammar."""
    return Grammar(tokenizer, GrammarCompiler.job(StructuredOutputsParams(**form), **options))


def bits(mask):
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(grammar, rng, most_tokens=60):
    """Follow a random text that the grammar allows, with a matcher that looks ahead and one that does not; the tokens that the
    first has been right about."""
    ahead, plain, num_right, text = grammar.begin(MOST_DRAFTS), grammar.begin(0), 0, []
    mask = grammar.first_mask
    for _ in range(most_tokens):
        guess = guess_of(grammar, text, rng) if rng.random() < 0.5 else []
        forced, num_forced, masks = ahead.look_ahead(guess)
        assert len(forced) <= 2 * MOST_DRAFTS + 1 and len(masks) <= min(MOST_DRAFTS, len(forced))
        assert num_forced == len(forced) or forced == guess[: len(forced)]
        count = rng.randint(0, len(masks))
        for token, expected in zip(forced[:count], masks, strict=False):
            assert token in bits(mask), "a token is forced that is not allowed"
            mask = plain.advance([token])
            assert mask == expected, "a mask ahead is not the one that comes"
        num_right += count
        last = rng.choice(bits(mask))
        if last == EOS:
            return num_right
        given, mask = ahead.advance([*forced[:count], last]), plain.advance([last])
        assert given == mask
        text += [*forced[:count], last]
        if mask is None:
            return num_right
    return num_right


def guess_of(grammar, text, rng):
    """Some tokens that may come next, and behind them some that perhaps may not."""
    matcher, guess = grammar.begin(0), []
    mask = matcher.advance(text) if text else grammar.first_mask
    for _ in range(rng.randint(0, 2 * MOST_DRAFTS + 1)):
        guess.append(rng.choice(bits(mask)) if mask else rng.randrange(VOCAB_SIZE))
        mask = None if mask is None or guess[-1] == EOS or rng.random() < 0.1 else matcher.advance([guess[-1]])
    return guess


@pytest.mark.parametrize(
    "form",
    [
        {"json": PERSON, "disable_any_whitespace": True},
        {"regex": "(the beginning|the (end|middle)) of it all[.!]"},
        {"choice": ["a long answer without end", "a long answer with an end", "none"]},
    ],
)
def test_masks_ahead_are_those_that_come(masked_tokenizer, form):
    """Whether the text then goes on as it was foretold or not."""
    grammar, rng = build_grammar(masked_tokenizer, form), random.Random(0)

    assert sum(walk(grammar, rng) for _ in range(6)) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("hide_eos", [False, True])
def test_masks_ahead_are_those_that_come_of_random_grammars(masked_tokenizer, hide_eos):
    """Schemas and patterns, also where the text may end."""
    rng, num_right = random.Random(hide_eos), 0
    for number in range(200):
        form = {"json": random_schema(rng)} if number % 2 else {"regex": random_regex(rng)}
        try:
            grammar = build_grammar(masked_tokenizer, form, hide_eos=hide_eos)
        except GrammarError:
            continue
        for _ in range(3):
            try:
                num_right += walk(grammar, rng)
            except GrammarError as error:
                assert "no token" in str(error)
    assert num_right > 500


def test_what_fails_ahead_does_not_fail_the_text(masked_tokenizer, monkeypatch):
    """Which goes on as if nobody had looked there, and nobody does again."""
    grammar = build_grammar(masked_tokenizer, {"json": PERSON, "disable_any_whitespace": True})
    ahead, plain = grammar.begin(MOST_DRAFTS), grammar.begin(0)
    forced, _, masks = ahead.look_ahead([])
    assert forced and ahead.advance(forced[:2]) == plain.advance(forced[:2]) == masks[1]

    with monkeypatch.context() as patch:
        patch.setattr(ahead, "_forced_tokens", lambda: spoil(ahead))
        assert ahead.look_ahead([]) == ([], 0, [])

    assert ahead.advance(forced[2:3]) == plain.advance(forced[2:3]) and ahead.look_ahead([]) == ([], 0, [])


def test_a_guess_of_what_the_tokenizer_lacks_ends_before_that(masked_tokenizer, monkeypatch):
    """A model may have more ids than its tokenizer, and a prompt or a draft model such an id."""
    monkeypatch.setattr(grammar_matcher.time, "process_time", lambda: 0.0)
    ahead = build_grammar(masked_tokenizer, {"regex": "[a-z]{20}"}).begin(MOST_DRAFTS)
    letter, lacking = masked_tokenizer.tokenizer.tokenize_str("a"), VOCAB_SIZE - 1
    assert ahead.advance(letter) is not None

    for guess in ([lacking], [*letter, lacking, *letter], letter * 6 + [lacking]):
        expected, _, _ = ahead.look_ahead(guess)
        assert expected == list(takewhile(lambda token_id: token_id != lacking, guess))


def spoil(matcher: Matcher):
    """As a limit of llguidance does."""
    assert not matcher._matcher.consume_token(EOS)
    grammar_matcher._check(matcher._matcher)


def test_looking_ahead_takes_little_time(masked_tokenizer, monkeypatch):
    """When it has taken too long it is not done again until that is made up for."""
    now = [0.0]
    monkeypatch.setattr(grammar_matcher.time, "process_time", lambda: now[0])
    matcher = build_grammar(masked_tokenizer, {"json": PERSON}).begin(MOST_DRAFTS)
    compute = matcher._forced_tokens

    def slow():
        now[0] += 5.5 * grammar_matcher.AHEAD_SECONDS
        return compute()

    monkeypatch.setattr(matcher, "_forced_tokens", slow)
    found = [matcher.look_ahead([]) for _ in range(6)]

    assert found[0][0] and not found[0][2]
    assert found[1:5] == [([], 0, [])] * 4 and found[5][0]


@pytest.mark.parametrize(
    "way", [WayOn(b"abcd", [], 0, []), WayOn(b"abcdefgh", [1, 70000, 3], 2, [b"ijklmnop", bytes(8)])]
)
def test_an_answer_is_read_as_it_was_written(way):
    """With any number of forced tokens and masks."""
    assert unpack_way_on(pack(way)) == way


def test_a_schema_that_is_text_is_forced_as_its_text_is_encoded(masked_tokenizer):
    """The tokens are those in which the tokenizer has the text, as far as these do not depend on what follows."""
    name = json.dumps(next(iter(PERSON["properties"])))
    grammar = build_grammar(masked_tokenizer, {"json": PERSON, "disable_any_whitespace": True})

    forced, *_ = grammar.begin(32).look_ahead([])

    text = build_byte_level().decode(forced)
    assert len(text) > 10 and f"{{{name}:".startswith(text)
