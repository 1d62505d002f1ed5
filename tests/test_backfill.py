"""Which sequences may start before others whose turn it is: the rule, asked of each of those passed by."""

import random

from test_scheduler import build_sequence

from engine.scheduling.backfill import MOST_PASSED, Backfill


def test_whoever_may_start_may_pass_each_of_those_passed_by():
    """In random plans, in which sequences are passed by for different reasons and others start."""
    draw, answers = random.Random(1), set()
    for _ in range(300):
        backfill, for_pages, for_adapters = Backfill(), [], []
        reserved = []
        for number in range(draw.randrange(40)):
            sequence = build_sequence(str(number), 3, 9, priority=draw.choice([0, 0, 0, 0, 0, 0, 0, 1]))
            sequence.num_passed, sequence.adapter_id = draw.randrange(MOST_PASSED + 1), draw.randrange(2)
            priority = sequence.params.priority

            def passes(passed, priority=priority):
                return all(of.params.priority == priority and of.num_passed < MOST_PASSED for of in passed)

            answers.add((passes(for_pages), bool(for_pages)))
            assert backfill.may_start(sequence) == passes(for_pages)
            assert backfill.may_have_adapter(sequence) == (not sequence.adapter_id or passes(for_adapters))
            match draw.randrange(6):
                case 0:
                    backfill.pass_for_pages(sequence)
                    for_pages.append(sequence)
                case 1:
                    backfill.pass_for_adapter(sequence)
                    for_adapters.append(sequence)
                case 2:
                    backfill.pass_for_step(sequence, 1)
                    reserved += [sequence] if not reserved else []
                case 3 if draw.random() < 0.2:
                    assert backfill.give_up_reservation() == bool(reserved)
                    for_pages, reserved = for_pages + reserved, []
                case 4:
                    before = {of: of.num_passed for of in (*for_pages, *for_adapters)}
                    backfill.started(sequence)
                    for passed, count in before.items():
                        counts = passed in for_pages or sequence.adapter_id
                        assert passed.num_passed == count + bool(counts)

    assert answers == {(True, True), (False, True), (True, False)}
