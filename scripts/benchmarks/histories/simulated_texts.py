"""What sequences say, for the scheduler's model checker: whose earlier texts a sequence may be given."""

from collections import defaultdict
from random import Random

from engine.scheduling.prefixes.earlier_texts import TEXTS, EarlierTexts
from engine.scheduling.sequence import NO_DRAFT, Sequence


class SimulatedTexts:
    """A plain twin of EarlierTexts, with few salts."""

    def __init__(self, random: Random) -> None:
        self.num_tokens = random.choice((0, 3, 16, 60))
        self._said: dict[tuple[int, bytes | None], list[int]] = defaultdict(list)
        self._to_keep: set[Sequence] = set()
        """Those that have begun since all was forgotten, and have begun for the first time."""
        self._begun: set[Sequence] = set()

    def begin(self, sequence: Sequence) -> None:
        """It has just got a slot: it is given what others of its salt have said."""
        if sequence not in self._begun:
            self._begun.add(sequence)
            self._to_keep.add(sequence)
        assert list(sequence.earlier) == self._texts(sequence), "a sequence is given another's texts"

    def end(self, sequence: Sequence) -> None:
        """It has ended, in whatever way."""
        said = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        if sequence in self._to_keep and sequence.salt is not None and sequence.output_token_ids:
            text = said[-max(1, self.num_tokens // TEXTS - 1) :]
            self._said[sequence.adapter_id, sequence.salt] += [*text, NO_DRAFT]
        self._to_keep.discard(sequence)

    def forget(self) -> None:
        """The prefix cache is emptied, or lost."""
        self._said.clear()
        self._to_keep.clear()

    def forget_adapter(self, uid: int) -> None:
        """No sequence has it any more."""
        for key in [key for key in self._said if key[0] == uid]:
            del self._said[key]

    def check(self, texts: EarlierTexts, sequences: list[Sequence]) -> None:
        """Nothing else is kept, and who has no slot has nothing."""
        kept = sum(min(self.num_tokens, len(said)) for said in self._said.values())
        assert texts.num_kept == kept, f"{texts.num_kept} tokens of texts are kept, and {kept} were said"
        assert not any(sequence.earlier for sequence in sequences if sequence.slot < 0), "who waits has texts"

    def _texts(self, sequence: Sequence) -> list[int]:
        if sequence.salt is None or not self.num_tokens or sequence.params.num_speculative_tokens == 0:
            return []
        return self._said[sequence.adapter_id, sequence.salt][-self.num_tokens :]
