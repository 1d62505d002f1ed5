"""One step, as the scheduler wants it: which sequences, which of their tokens, in which order."""

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.sequence import Sequence, TokenLogprobs


@dataclass(eq=False, slots=True)
class NextIterationPlan:
    """Rows of one step. Decoding rows come first, those without drafts before others, then chunks
    of prompts.

    A plan without rows has ``copies`` alone, and is no step. Nor is one with ``samples_of``: its
    rows compute no token, and sample from logits that an earlier plan has computed. Of those
    ``counts[i]`` are kept of row i, which samples from the first ``samples[i]``.

    Row i computes ``counts[i]`` tokens of ``sequences[i]`` from token ``starts[i]`` on, and
    samples behind the last ``samples[i]`` of them: a decoding row behind each, a chunk behind its
    last one when that is its prompt's last. A decoding row's tokens are the one that its slot
    sampled last, which may still be on the device, and the slot's drafts, which are there too or
    are ``expected``; a chunk's are known here. Where drafts are in flight a decoding row's start is
    the most that it may be.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    constrained: list[int] = field(default_factory=list)
    """Rows that sample what their sequence's constraint allows."""
    expected: dict[int, ListOf[int]] = field(default_factory=dict)
    """By row with a constraint that has drafts, these; where it samples, those alone whose masks are
    known."""
    num_guessed: dict[int, int] = field(default_factory=dict)
    """By row with such drafts, those that its constraint does not force: the last ones."""
    guesses: dict[int, ListOf[int]] = field(default_factory=dict)
    """By row with a constraint whose drafts a draft model writes in the step, these, once they have
    been read; a row that samples late has those of its earlier plan."""
    late: list[int] = field(default_factory=list)
    """Decoding rows that do not sample in this step, though they might, as their constraint has not
    answered yet: their logits are kept."""
    samples_of: "NextIterationPlan | None" = None
    """The plan from whose kept logits all rows sample."""
    num_decodes: int = 0
    num_passes: int = 0
    """Times that a draft model runs in the step to draft, the most drafts of a row."""
    looks_up: bool = False
    """Whether drafts are looked for behind the tokens that the step samples."""
    num_tokens: int = 0
    state_sources: list[int] = field(default_factory=list)
    """By row, the slot of the recurrent state before its first token, in a model that has such."""
    state_slots: list[int] = field(default_factory=list)
    """By row, the slot for the state behind its last token."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that have been given a slot, and loaded, since the last plan."""
    grown: list[Sequence] = field(default_factory=list)
    """Decoding sequences that have been given a page in this plan."""
    copies: list[Copies] = field(default_factory=list)
    """What is copied between the device and the host: of pages, of states, or nothing."""
    adapter_slots: list[int] = field(default_factory=list)
    """By row, the slot of its adapter, -1 where it has none; empty if there are no such slots."""
    adapter_loads: list[tuple[int, int]] = field(default_factory=list)
    """Adapters, and the slots that they are written to before the step."""

    @property
    def num_rows(self) -> int:
        """Rows that are not padding."""
        return len(self.sequences)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decoding rows, drafts included."""
        return sum(self.counts[: self.num_decodes])

    @property
    def drafted(self) -> list[int]:
        """Decoding rows with drafts that are on the device, those with the most first."""
        return sorted(filter(self._is_drafted, range(self.num_decodes)), key=lambda row: -self.counts[row])

    @property
    def has_guesses(self) -> bool:
        """Whether a draft model writes drafts in the step that constraints are to be asked about."""
        return any(map(self._is_drafted, self.late))

    def _is_drafted(self, row: int) -> bool:
        return self.counts[row] > 1 and row not in self.expected

    @property
    def read_slots(self) -> set[int]:
        """The slots of adapters that the step reads."""
        return {slot for slot in self.adapter_slots if slot >= 0}

    def sampler_rows(self, *, drafts: bool) -> ListOf[int]:
        """By row, the row of the sampler with its first logits: the same one, or where rows may
        have ``drafts`` one behind those of the rows before it."""
        return list(accumulate(self.logits, initial=0)) if drafts else range(self.num_rows)

    @property
    def logits(self) -> list[int]:
        """By row, behind how many of its last tokens there are logits to sample from, now or late."""
        logits = list(self.samples)
        for row in self.late:
            logits[row] = self.counts[row]
        return logits

    def drop(self, sequence: Sequence) -> None:
        """A sequence that has no row yet was preempted."""
        if sequence in self.grown:
            self.grown.remove(sequence)

    def add_decodes(self, sequences: list[Sequence], drafts: list[int] | None = None) -> None:
        """Add the first rows: the next token of each of these decoding sequences, and of each so
        many drafts behind it, by default none."""
        self.sequences = sequences
        self.starts = [sequence.num_computed_tokens for sequence in sequences]
        self.num_decodes = len(sequences)
        self.counts = [1] * len(sequences) if drafts is None else [1 + count for count in drafts]
        self.samples = list(self.counts)
        self.num_tokens = sum(self.counts)
        for row, sequence, count in zip(range(len(sequences)), sequences, self.counts, strict=True):
            if sequence.constraint is not None:
                self._add_constrained(row, sequence, count - 1)
            sequence.num_computed_tokens += count
            sequence.num_in_flight += count

    def _add_constrained(self, row: int, sequence: Sequence, num_drafts: int) -> None:
        """A decoding row samples in the step if its constraint has answered, and else late."""
        if num_drafts and sequence.expected_drafts:
            self.expected[row] = sequence.expected_drafts[:num_drafts]
            self.num_guessed[row] = max(0, num_drafts - sequence.num_forced_drafts)
        if sequence.has_mask:
            self.constrained.append(row)
        else:
            self.samples[row] = 0
            self.late.append(row)
            sequence.awaits_sample = True

    def add_late(self, sequence: Sequence, row: int) -> None:
        """Add a row: the tokens of a sequence whose logits are kept of a row of ``samples_of``.

        Its drafts are in the right places if as many tokens as were in flight then have landed, or
        a draft model wrote them, and have masks as far as the constraint, which has heard of these,
        expects the same. The others are not accepted.
        """
        of, constraint = self.samples_of, sequence.constraint
        assert of is not None and constraint is not None
        fed = of.guesses.get(row, ())
        if fed:
            self.guesses[self.num_rows] = fed
        elif of.starts[row] == sequence.num_tokens - 1:
            fed = of.expected.get(row, ())
        pairs = zip(fed, constraint.expected, constraint.expected_masks, strict=False)
        masked = [draft for draft, *_ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if masked:
            self.expected[self.num_rows] = masked
        self.num_guessed[self.num_rows] = of.num_guessed.get(row, 0)
        self.constrained.append(self.num_rows)
        self.sequences.append(sequence)
        self.starts.append(sequence.num_tokens)
        self.counts.append(of.counts[row])
        self.samples.append(1 + len(masked))
        left_out = of.counts[row] - self.samples[-1]
        sequence.num_in_flight -= left_out
        sequence.take_back(left_out, sequence.num_tokens + len(masked))

    def add(self, sequence: Sequence, count: int) -> None:
        """Add a row: the next ``count`` tokens of a sequence, which now count as computed."""
        samples = sequence.num_computed_tokens + count == sequence.num_total_tokens
        if samples and sequence.constraint is not None:
            self.constrained.append(self.num_rows)
        self.sequences.append(sequence)
        self.starts.append(sequence.num_computed_tokens)
        self.counts.append(count)
        self.samples.append(samples)
        self.num_tokens += count
        sequence.num_computed_tokens += count
        sequence.num_in_flight += samples


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: row i the tokens ``token_ids[i]``, at least one and at most as many as it
    samples, none if it samples none.

    ``logprobs`` are of the tokens of rows that asked for them; ``prompt_logprobs`` are, by row,
    the index of a prompt token, and the log-probabilities from it on. ``drafts`` are, by row, how
    many drafts there are for the tokens behind these, and ``of_earlier`` whether they are of earlier
    texts; empty without speculation.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    drafts: list[int] = field(default_factory=list)
    of_earlier: list[bool] = field(default_factory=list)
