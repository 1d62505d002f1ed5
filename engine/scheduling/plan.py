"""One step, as the scheduler wants it: which sequences, which of their tokens, in which order."""

from dataclasses import dataclass, field

from engine.scheduling.host_cache.copies import Copies
from engine.scheduling.sequence import Sequence, TokenLogprobs


@dataclass(eq=False, slots=True)
class NextIterationPlan:
    """Rows of one step. Decoding rows of one token each come first, then chunks of prompts.

    A plan without rows has ``copies`` alone, and is no step.

    Row i computes ``counts[i]`` tokens of ``sequences[i]`` from token ``starts[i]`` on, and
    samples its next token where ``samples[i]``: a decoding row always, a chunk only when it is its
    prompt's last. A decoding row's own token is the one its slot sampled last, which may still be
    on the device; a chunk's tokens are known here.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    constrained: list[int] = field(default_factory=list)
    """Rows that sample what their sequence's constraint allows."""
    num_decodes: int = 0
    num_tokens: int = 0
    state_sources: list[int] = field(default_factory=list)
    """By row, the slot of the recurrent state before its first token, in a model that has such."""
    state_slots: list[int] = field(default_factory=list)
    """By row, the slot for the state behind its last token."""
    released: list[Sequence] = field(default_factory=list)
    """Sequences that lost their slot since the last plan; an admitted one may be among them."""
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
    def read_slots(self) -> set[int]:
        """The slots of adapters that the step reads."""
        return {slot for slot in self.adapter_slots if slot >= 0}

    def drop(self, sequence: Sequence) -> None:
        """A sequence that has no row yet was preempted."""
        if sequence in self.grown:
            self.grown.remove(sequence)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Add the first rows: the next token of each of these decoding sequences."""
        self.sequences = sequences
        self.starts = [sequence.num_computed_tokens for sequence in sequences]
        self.num_decodes = self.num_tokens = count = len(sequences)
        self.counts = [1] * count
        self.samples = [True] * count
        for row, sequence in enumerate(sequences):
            sequence.num_computed_tokens += 1
            sequence.num_in_flight += 1
            if sequence.constraint is not None:
                self.constrained.append(row)

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
    """What a step gave: row i sampled ``token_ids[i]``, which means nothing if it does not sample.

    ``logprobs`` are of the tokens of rows that asked for them; ``prompt_logprobs`` are, by row,
    the index of a prompt token, and the log-probabilities from it on.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
