"""SequenceBuffer: dense rows that inherit nothing and keep their sequences through any moves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.sequence_buffer import SequenceBuffer

MAX_NUM_SEQS, MAX_MODEL_LEN, PAGES_PER_SEQ = 4, 12, 6


def build_buffer():
    """A buffer of four rows."""
    return SequenceBuffer(MAX_NUM_SEQS, MAX_MODEL_LEN, PAGES_PER_SEQ)


def build_sequence(number=1, *, prompt=3, outputs=0, pages=2, **params):
    """A sequence whose every value says which one it is."""
    sequence = Sequence(str(number), [number] * prompt, SamplingParams(**params), frozenset(), 9, seed=100 + number)
    sequence.output_token_ids = [number] * outputs
    sequence.slot, sequence.pages = number % MAX_NUM_SEQS, [[number * 10 + page for page in range(pages)]]
    sequence.first_pages = [0]
    return sequence


def assert_row_holds(buffer, sequence):
    """The row of a sequence holds its values in every column, as far as they are in use."""
    row = buffer.row_of(sequence)
    known = sequence.prompt_token_ids + sequence.output_token_ids
    assert buffer.num_tokens[row] == len(known)
    assert buffer.token_ids[row, : len(known)].tolist() == known
    assert buffer.num_pages[row] == len(sequence.pages[0])
    assert buffer.page_indices[0, row, : len(sequence.pages[0])].tolist() == sequence.pages[0]
    assert (buffer.slots[row], buffer.seeds[row]) == (sequence.slot, sequence.seed)
    params = sequence.params
    actual = [column[row] for column in (buffer.temperature, buffer.top_k, buffer.top_p, buffer.min_p)]
    assert actual == [np.float32(value) for value in (params.temperature, params.top_k, params.top_p, params.min_p)]


def test_a_reused_row_inherits_nothing():
    """What a long, hot, truncated predecessor left behind is not in its successor's row."""
    buffer = build_buffer()
    predecessor = build_sequence(1, prompt=9, pages=5, temperature=2.0, top_k=7, top_p=0.5, min_p=0.3)
    buffer.add(predecessor)
    buffer.remove(predecessor)
    buffer.condense()

    successor = build_sequence(2, prompt=2, pages=1)
    row = buffer.add(successor)

    assert row == 0
    assert_row_holds(buffer, successor)


def test_adding_writes_its_own_row_and_no_other():
    """An addition costs its own tokens, whatever the size of the buffer (an ancestor copied the whole token matrix)."""
    buffer = build_buffer()
    matrices = buffer.token_ids, buffer.page_indices
    for matrix in matrices:
        matrix[:] = -7

    buffer.add(build_sequence(1, prompt=3, pages=2))

    assert buffer.token_ids is matrices[0] and buffer.page_indices is matrices[1]
    assert [int((matrix != -7).sum()) for matrix in matrices] == [3, 2]


def test_a_resumed_sequence_brings_its_output():
    """After preemption the row holds prompt and output, since both are computed again."""
    buffer = build_buffer()
    resumed = build_sequence(3, outputs=4)

    buffer.add(resumed)

    assert_row_holds(buffer, resumed)


def test_new_pages_are_appended():
    """The page that each of some sequences got since is written behind those already known."""
    buffer, sequences = build_buffer(), [build_sequence(1, pages=1), build_sequence(2, pages=3), build_sequence(3)]
    for sequence in sequences:
        buffer.add(sequence)

    sequences[0].pages[0].append(77)
    sequences[1].pages[0].append(78)
    buffer.add_pages([sequences[1], sequences[0]])

    for sequence in sequences:
        assert_row_holds(buffer, sequence)


def test_swap_exchanges_two_rows_whole():
    """Rows of different lengths change places with every column."""
    buffer, short, long = build_buffer(), build_sequence(1, prompt=1, pages=1), build_sequence(2, prompt=9, pages=5)
    buffer.add(short)
    buffer.add(long)

    buffer.swap(0, 1)

    assert (buffer.row_of(short), buffer.row_of(long)) == (1, 0)
    assert_row_holds(buffer, short)
    assert_row_holds(buffer, long)


def test_rows_of_follows_the_order_asked():
    """rows_of answers in the order of its argument, not of the rows."""
    buffer, sequences = build_buffer(), [build_sequence(number) for number in (1, 2, 3)]
    for sequence in sequences:
        buffer.add(sequence)

    assert buffer.rows_of(sequences[::-1]).tolist() == [2, 1, 0]


@given(st.lists(st.one_of(st.integers(1, 6), st.lists(st.integers(0, 3), min_size=1, max_size=3)), max_size=20))
def test_any_history_keeps_rows_dense_and_whole(history):
    """After any additions and removals the rows are 0..n-1 and each still holds its own sequence."""
    buffer, present, count = build_buffer(), [], 0

    for event in history:
        if isinstance(event, list):
            for index in {index % len(present) for index in event} if present else ():
                buffer.remove(present[index])
                present[index] = None
            present = [sequence for sequence in present if sequence]
            buffer.condense()
        elif len(present) < MAX_NUM_SEQS:
            count += 1
            present.append(build_sequence(count, prompt=event, pages=event, top_k=count))
            buffer.add(present[-1])
        assert sorted(buffer.row_of(sequence) for sequence in present) == list(range(buffer.num_rows))
        for sequence in present:
            assert_row_holds(buffer, sequence)
