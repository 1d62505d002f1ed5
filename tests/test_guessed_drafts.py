"""N-grams as drafts of sequences with a grammar: what is looked up, what the grammar allows of it, and when it is asked."""

import pytest
from grammar_constraints import LIMITS, advance, allowed, hear, running
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_drafts_on_device import NO_DRAFT, plain_look_up
from test_speculation import MOST, ROOM, costing, decoding

from driver.grammars import guesses as guesses_module
from driver.grammars.compiler import LAST
from driver.grammars.guesses import Guesses, NgramIndex
from driver.grammars.matcher_pool import Allowance
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.structured_outputs import StructuredOutputsParams

COUNT = 5


@given(
    prompt=st.lists(st.integers(0, 3), max_size=16),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=16),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4), (3, 5)]),
)
def test_guesses_are_what_followed_the_latest_of_the_longest_runs(prompt, output, sizes):
    """As on the device; what followed in the prompt ends where that does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guesses_module, "MOST_CANDIDATES", 99)
        guesses = Guesses(NgramIndex(*sizes, prompt), output[:-1])
        guess = guesses.read(output[-1:], COUNT)

    drafts = plain_look_up(prompt + output, COUNT, *sizes)
    assert guess == drafts[: len(guess)]
    assert bool(guess) == (NO_DRAFT not in drafts)


def test_guesses_go_on_as_an_earlier_text_and_end_with_it():
    """A run at the end of one is not found, as nothing follows it there."""
    prompt = NgramIndex(2, 3, [1, 2, 3, 4, -1, 5, 1, 2, -1, 9, 1])

    for output, expected in (([2], [3, 4]), ([5, 1], [2]), ([3, 4], []), ([2, 6, 9, 1], [2, 6, 9, 1])):
        assert Guesses(prompt, []).read(output, 4) == expected


def test_what_was_expected_and_came_is_expected_on():
    """Though the last tokens alone came later with others behind them; and behind it what followed that."""
    guesses = Guesses(NgramIndex(1, 2, [1, 2, 3, 4, 5, 6, 7, 3, 9]), [1])

    assert guesses.read([2], 4) == [3, 4, 5, 6]
    guesses.answered([3, 4, 5], 1)

    assert guesses.read([3], 4) == [4, 5, 6, 7]
    assert guesses.read([8], 4) == [] and guesses.read([3], 4)[:1] == [8]


def test_a_grammar_is_not_asked_about_guesses_that_are_mostly_wrong_until_they_would_be_right():
    """Of a prompt in which each number has its successor, and a text that goes on so later alone."""
    guesses = Guesses(NgramIndex(1, 1, [token for number in range(60) for token in (number, 1000 + number)]), [])

    asked = []
    for number in range(60):
        guess = guesses.read([number], COUNT)
        guesses.answered(guess, 0)
        asked.append(bool(guess))
        guesses.read([(1000 if number >= 30 else 2000) + number], COUNT)

    assert asked[0] and not any(asked[10:30]) and all(asked[45:])


def test_guesses_that_are_forced_teach_nothing_about_guesses():
    """What the grammar forces is right anyway."""
    guesses = Guesses(NgramIndex(1, 1, [1, 2, 3, 4]), [])
    guesses.read([1], 3)
    guesses.answered([2, 3, 4], 2)
    before = guesses.acceptance

    guesses.read([2, 3], 3)
    assert guesses.acceptance == before
    guesses.read([9], 3)
    assert guesses.acceptance < before


def test_the_grammar_says_what_may_follow_its_guesses_and_allows_no_others(tokenizer: HuggingFaceTokenizer) -> None:
    """A worker's answer has them as far as they are words, with the masks that come behind them; without a prompt there are
    none."""
    limits = structs.replace(LIMITS, num_speculative_tokens=3, prompt_lookup=(1, 2))
    text = [tokenizer.encode(letter)[0] for letter in "abcdefg9"]
    with running(tokenizer, limits) as grammars:
        grammar = grammars.compile(grammars.job(StructuredOutputsParams(regex="[a-z]{40}")), LAST)
        assert grammar is not None
        allowance = Allowance(heavy=False)
        index = grammars.index(text)
        plain = grammars.constraint(grammar, allowance, [], LAST, 0, index)
        assert plain is not None
        advance(plain, text[0])
        for _ in range(20):  # one that a busy machine kept for long looks ahead at no more
            guessing = grammars.constraint(grammar, allowance, [], LAST, None, index)
            assert guessing is not None
            advance(guessing, text[0])
            guessing.advance(text[1])
            hear(guessing)
            if guessing.expected:
                break
            guessing.close()

        assert (guessing.expected, guessing.num_forced) == (text[2:7], 0)
        assert len(guessing.expected_masks) == 3 and not plain.expected
        for token_id, mask in zip(text[1:5], [guessing.mask, *guessing.expected_masks], strict=True):
            advance(plain, token_id)
            assert mask.tolist() == plain.mask.tolist() and allowed(plain)
        guessing.close()
        plain.close()


class Guessing:
    """A constraint that forces one token and guesses others."""

    complete, error, internal = False, None, False
    expected, num_forced = (1, 2, 3, 4), 1
    expected_masks = (None,) * MOST

    def __init__(self, acceptance):
        self.guess_acceptance = acceptance


@pytest.mark.parametrize(("acceptance", "granted"), [(0.1, 1), (0.95, MOST)])
def test_guesses_are_granted_by_their_own_acceptance_and_what_is_forced_by_its_own(acceptance, granted):
    """Where guesses are wrong it is as if there were none, and what is forced is drafted as before."""
    speculation, sequence = costing(0.2), decoding(num_drafts=0)
    sequence.constraint = Guessing(acceptance)
    sequence.expected, sequence.num_forced = sequence.constraint.expected, 1

    for _ in range(20):
        speculation.land(sequence, 1 + MOST, 2, 0, 1)  # the forced one is right, the first guess wrong

    assert sequence.forced_acceptance.value > 0.95
    assert speculation.drafts([sequence], ROOM, ROOM) == {sequence: granted}


def test_what_is_forced_is_drafted_at_once_after_guesses_that_were_not_worth_it():
    """A row with a grammar does not rest, as its drafts cost nothing to find; of the guesses one is tried now and then."""
    speculation, sequence = costing(0.2), decoding(num_drafts=0)
    sequence.constraint = Guessing(0.01)

    tried = []
    for number in range(1000):
        forced = number == 999
        sequence.expected, sequence.num_forced = sequence.constraint.expected, int(forced)
        tried.append(speculation.drafts([sequence], ROOM, ROOM).get(sequence, 0))
        if tried[-1] and not forced:
            speculation.land(sequence, 2, 1, 0, 0)

    assert 0 < sum(tried[:999]) < 40 and max(tried) == 1
    assert tried[999] == 1
