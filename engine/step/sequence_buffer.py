"""The device's input for each running sequence, in numpy rows kept dense from 0."""

import numpy as np
from numpy.typing import NDArray

from engine.sampling.needs import needs_of
from engine.scheduling.sequence import Sequence


class SequenceBuffer:
    """Columns over rows. Row order has no meaning; ``slots`` is the index of a row's device state.

    ``add`` writes every column of its row, so a reused row inherits nothing: tokens and pages past
    ``num_tokens`` and ``num_pages`` are never read. Rows 0..num_rows-1 are in use, except between
    ``remove`` and ``condense``.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, pages_per_seq: int, num_groups: int = 1) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        """Tokens known when the row was added, which its chunks compute."""
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.page_indices = np.zeros((num_groups, max_num_seqs, pages_per_seq), np.int32)
        """By cache group. What lies before ``first_pages`` is never read either."""
        self.first_pages = np.zeros((num_groups, max_num_seqs), np.int32)
        self.num_pages = np.zeros(max_num_seqs, np.int32)
        self.slots = np.zeros(max_num_seqs, np.int32)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.zeros(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint32)
        self.needs = np.zeros(max_num_seqs, np.int32)
        """Need flags: the sampler's work for the row."""
        self._sequences: list[Sequence | None] = []
        self._rows: dict[Sequence, int] = {}

    @property
    def num_rows(self) -> int:
        """Rows in use, and holes not yet closed by ``condense``."""
        return len(self._sequences)

    def row_of(self, sequence: Sequence) -> int:
        """The current row of a sequence."""
        return self._rows[sequence]

    def rows_of(self, sequences: list[Sequence]) -> NDArray[np.intp]:
        """The rows of several sequences, in their order."""
        return np.fromiter(map(self._rows.__getitem__, sequences), np.intp, len(sequences))

    def add(self, sequence: Sequence) -> int:
        """Add a row for a sequence that was just given its slot."""
        row = len(self._sequences)
        self._sequences.append(sequence)
        self._rows[sequence] = row
        prompt = len(sequence.prompt_token_ids)
        self.token_ids[row, :prompt] = sequence.prompt_token_ids
        self.token_ids[row, prompt : sequence.num_tokens] = sequence.output_token_ids
        self.num_tokens[row] = sequence.num_tokens
        self.num_pages[row] = max(map(len, sequence.pages))
        for group, pages in enumerate(sequence.pages):
            self.page_indices[group, row, : len(pages)] = pages
            self.first_pages[group, row] = sequence.first_pages[group]
        self.slots[row] = sequence.slot
        params = sequence.params
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = sequence.seed
        self.needs[row] = needs_of(sequence)
        return row

    def add_pages(self, sequences: list[Sequence]) -> None:
        """Append the one page of each group by which each sequence has grown."""
        rows = self.rows_of(sequences)
        places = self.num_pages[rows]
        for group, tables in enumerate(self.page_indices):
            tables[rows, places] = [sequence.pages[group][-1] for sequence in sequences]
            self.first_pages[group, rows] = [sequence.first_pages[group] for sequence in sequences]
        self.num_pages[rows] += 1

    def move_windows(self, sequences: list[Sequence], groups: list[int]) -> None:
        """Write the pages of windows anew: those of prompts move with each chunk."""
        for row, sequence in zip(self.rows_of(sequences), sequences, strict=True):
            for group in groups:
                first, pages = sequence.first_pages[group], sequence.pages[group]
                self.page_indices[group, row, first : len(pages)] = pages[first:]
                self.first_pages[group, row] = first
                self.num_pages[row] = max(self.num_pages[row], len(pages))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence's row. ``condense`` closes the hole."""
        self._sequences[self._rows.pop(sequence)] = None

    def swap(self, left: int, right: int) -> None:
        """Exchange two rows; of tokens and pages, only the part in use."""
        tokens = max(self.num_tokens[left], self.num_tokens[right])
        pages = max(self.num_pages[left], self.num_pages[right])
        for column, width in ((self.token_ids, tokens), *((table, pages) for table in self.page_indices)):
            column[[left, right], :width] = column[[right, left], :width]
        self.first_pages[:, [left, right]] = self.first_pages[:, [right, left]]
        for scalars in (
            self.num_tokens, self.num_pages, self.slots, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds,
            self.needs,
        ):  # fmt: skip
            scalars[[left, right]] = scalars[[right, left]]
        sequences = self._sequences
        sequences[left], sequences[right] = sequences[right], sequences[left]
        for row in (left, right):
            sequence = sequences[row]
            if sequence is not None:
                self._rows[sequence] = row

    def condense(self) -> None:
        """Fill holes with rows from the end, so that rows 0..num_rows-1 are in use again."""
        for hole in [row for row, sequence in enumerate(self._sequences) if sequence is None]:
            while self._sequences and self._sequences[-1] is None:
                self._sequences.pop()
            if hole >= len(self._sequences):
                return
            self.swap(hole, len(self._sequences) - 1)
            self._sequences.pop()
