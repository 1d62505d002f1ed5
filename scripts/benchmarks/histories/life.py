"""What has to become of a sequence, for the scheduler's model checker.

The next token is a function of all tokens before it, as in a greedy model.
"""

import zlib
from dataclasses import dataclass, field
from random import Random

from engine.scheduling.sequence import Sequence

VOCABULARY, EOS = 11, 0
WRONG = -1
"""A draft, or a token that is expected, which is no sequence's."""
STEMS = 3
"""Prompts begin alike in so many ways."""
LONGEST_PROMPT, LONGEST_OUTPUT = 20, 12


@dataclass
class Life:
    """A sequence, and what has to become of it."""

    sequence: Sequence
    tokens: list[int]
    """The prompt, and what a model would give after it, were there no end token."""
    histories: list[int]
    """What stands for the token at each place and all before it."""
    length: int | None = None
    """Tokens after which its constraint is complete."""
    num_computed: int = 0
    num_drafts: int = 0
    received: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    """Of its prompt's tokens, whose log-probabilities it has received."""
    reason: str | None = None
    number: int = 0
    """Of those that have got a slot, when it last did."""
    since: int = 0
    """How often all had been forgotten when it last got a slot."""
    num_passed: int = 0
    """Times that another of its client, user and priority got a slot before it, though it could have started but for pages."""

    @property
    def output(self) -> list[int]:
        """What a model would give, were there no end."""
        return self.tokens[len(self.sequence.prompt_token_ids) :]

    @property
    def expected(self) -> list[int]:
        """The output when nobody ends it early."""
        output = self.output[: self.length]
        return output[: output.index(EOS) + 1] if EOS in output else output

    def check_received(self) -> None:
        """It has ended, and has received what it was to give; one that was ended early, the beginning of that."""
        whole = self.expected
        wanted = whole if self.reason is not None else whole[: len(self.received)]
        assert self.received == self.sequence.output_token_ids == wanted, "a token is lost, doubled or another's"
        if self.reason is not None and self.sequence.params.prompt_logprobs is not None:
            asked = len(self.sequence.prompt_token_ids) - 1
            assert self.num_prompt_logprobs == asked, "a prompt's token has no log-probabilities, or twice"


def random_prompt(random: Random, longest: int) -> list[int]:
    """Often the beginning of another's, or all of it."""
    stem = Random(random.randrange(STEMS))
    prompt = [stem.randrange(1, VOCABULARY) for _ in range(random.randint(1, longest))]
    if random.random() < 0.5:
        prompt[-1] = random.randrange(1, VOCABULARY)
    return prompt


def life_of(sequence: Sequence, length: int | None) -> Life:
    """A new one, with all that it is to give, and with the length of its constraint, if it has one."""
    tokens, histories = list(sequence.prompt_token_ids), []
    salt = sequence.request_id.encode() if sequence.salt is None else sequence.salt
    history = zlib.crc32(salt)  # the same in every process, unlike hash
    for token in tokens:
        history = hash((history, token))
        histories.append(history)
    for _ in range(sequence.max_tokens):
        tokens.append(history % VOCABULARY)
        history = hash((history, tokens[-1]))
        histories.append(history)
    return Life(sequence, tokens, histories, length)
