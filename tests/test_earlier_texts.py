"""Texts that are kept for drafts of later sequences: whose they are, how many, and what forgets them."""

import pytest

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from engine.sampling_params import SamplingParams
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.plan import StepResult
from engine.scheduling.prefixes.earlier_texts import MOST_SALTS, EarlierTexts
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_memory import SequenceMemory

ASKED = SamplingParams(temperature=0)


def build_sequence(salt, prompt=(1,), *, name="a", most=3, adapter=0, params=ASKED):
    """One that has not begun."""
    return Sequence(name, list(prompt), params, frozenset(), most, 0, salt=salt, adapter_id=adapter)


def say(texts, salt, prompt, output, adapter=0):
    """A sequence begins, and ends with an output."""
    sequence = build_sequence(salt, prompt, adapter=adapter)
    texts.begin(sequence)
    sequence.output_token_ids += output
    texts.end(sequence)
    texts.check_integrity()


def kept(texts, salt, **others):
    """What a sequence of a salt would be given."""
    return list(texts.of(build_sequence(salt, **others)))


def test_texts_are_kept_apart_by_salt_and_adapter():
    """And none of those without a salt or an output, or where none are to be kept; who wants no drafts is given none."""
    texts, none = EarlierTexts(40), EarlierTexts()
    say(texts, b"a", [1], [2, 3])
    say(texts, b"b", [4], [5])
    say(texts, b"a", [6], [7])
    say(texts, b"a", [9], [])
    say(texts, b"a", [8], [1], adapter=3)
    say(texts, None, [8], [8])
    say(none, b"a", [1], [2])

    assert kept(texts, b"a") == [1, 2, 3, -1, 6, 7, -1] and kept(texts, b"b") == [4, 5, -1]
    assert kept(texts, b"a", adapter=3) == [8, 1, -1] and not kept(texts, b"b", adapter=3)
    assert not kept(texts, b"c") and not kept(texts, None) and not kept(none, b"a")
    assert not kept(texts, b"a", params=SamplingParams(num_speculative_tokens=0))
    assert (texts.num_kept, texts.num_salts) == (13, 3)


def test_the_last_tokens_are_kept_and_no_text_takes_more_than_a_part():
    """So that several have room."""
    texts = EarlierTexts(16)
    for first in range(0, 100, 10):
        say(texts, b"", list(range(first, first + 8)), [first + 8, first + 9])

    assert kept(texts, b"") == [67, 68, 69, -1, 77, 78, 79, -1, 87, 88, 89, -1, 97, 98, 99, -1]


def test_salts_that_ended_nothing_for_long_are_forgotten():
    """Whatever others do, what is kept is bounded."""
    texts = EarlierTexts(8)
    for number in range(MOST_SALTS + 5):
        say(texts, b"%d" % number, [1], [2])
        say(texts, b"0", [1], [2])

    assert kept(texts, b"0") and not kept(texts, b"1") and kept(texts, b"%d" % (MOST_SALTS + 4))
    assert texts.num_salts == MOST_SALTS


def test_what_has_begun_before_all_was_forgotten_leaves_nothing():
    """Its text was said before; what begins afterwards leaves its own."""
    texts = EarlierTexts(40)
    say(texts, b"a", [1], [2])
    before = build_sequence(b"a", [3])
    texts.begin(before)
    texts.forget_all()
    texts.begin(before)  # it was preempted
    before.output_token_ids += [4]
    texts.end(before)

    assert not before.earlier and not kept(texts, b"a") and texts.num_kept == 0
    say(texts, b"a", [5], [6])
    assert kept(texts, b"a") == [5, 6, -1]


def build_scheduler():
    """With room for one adapter, and texts of 40 tokens."""
    memory = SequenceMemory(HBMPageManager(20), CacheGroups(4), earlier=EarlierTexts(40))
    return InferenceScheduler(memory, max_num_seqs=4, max_num_batched_tokens=16, adapters=AdapterSlots(1))


def serve(scheduler, *sequences, steps=99):
    """Let these sequences take as many steps as they need, or so many; a token is one more than the one before."""
    for sequence in sequences:
        scheduler.add(sequence)
    while steps and (plan := scheduler.plan()) is not None:
        steps -= 1
        ids = [[row.prompt_token_ids[-1] + 1 + len(row.output_token_ids)] for row in plan.sequences]
        scheduler.update(plan, StepResult([tokens if n else [] for tokens, n in zip(ids, plan.samples, strict=True)]))


@pytest.mark.parametrize("forget", ["reset", "sleep", "other weights", "nothing"])
def test_what_forgets_pages_forgets_texts(forget):
    """Also that of a sequence under way, which is given its own tokens all the same."""
    scheduler = build_scheduler()
    serve(scheduler, build_sequence(b"a", [1]))
    under_way = build_sequence(b"a", [20], name="b")
    serve(scheduler, under_way, steps=1)
    assert list(under_way.earlier) == [1, 2, 3, 4, -1]

    match forget:
        case "reset":
            scheduler.forget_all()
        case "sleep":
            scheduler.lose_cache(keep_host=True)
        case "other weights":
            scheduler.lose_cache()
    serve(scheduler)

    assert under_way.output_token_ids == [21, 22, 23] and not under_way.earlier
    last = build_sequence(b"a", [30], name="c")
    serve(scheduler, last, steps=1)
    assert list(last.earlier) == ([1, 2, 3, 4, -1, 20, 21, 22, 23, -1] if forget == "nothing" else [])
    scheduler.check_integrity()


def test_a_sequence_leaves_a_text_however_it_ends_if_it_has_said_anything():
    """While it waits it leaves none, nor while its prompt is computed; and it has no texts but while it has a slot."""
    scheduler = build_scheduler()
    long, decoding = build_sequence(b"a", range(30), name="long"), build_sequence(b"a", [40], name="decoding")
    waiting = build_sequence(b"a", [50], name="waiting")
    serve(scheduler, long, steps=1)
    scheduler.finish("long")
    serve(scheduler, decoding, steps=2)
    scheduler.add(waiting)
    scheduler.finish("waiting")
    scheduler.finish("decoding")

    assert kept(scheduler.memory.earlier, b"a") == [40, 41, 42, -1]
    assert not any(sequence.earlier for sequence in (long, decoding, waiting))
