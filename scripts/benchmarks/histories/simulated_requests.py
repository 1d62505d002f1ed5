"""What clients ask in a random history of the scheduler."""

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from random import Random

import msgspec

from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from scripts.benchmarks.histories.life import (
    EOS,
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    VOCABULARY,
    Life,
    life_of,
    random_prompt,
)
from scripts.benchmarks.histories.random_scheduler import RandomScheduler
from scripts.benchmarks.histories.simulated_adapters import SimulatedAdapters
from scripts.benchmarks.histories.simulated_constraint import LateConstraint
from scripts.benchmarks.histories.turns import USERS, WEIGHTS

PARAMS = SamplingParams(temperature=0)


class SimulatedRequests:
    """Requests of one to three samples that fit in the scheduler's pages, each sample with its life."""

    def __init__(self, random: Random, drawn: RandomScheduler, adapters: SimulatedAdapters) -> None:
        self._random, self._drawn, self._adapters = random, drawn, adapters

    def draw(self, ended: ListOf[Life], first: int, client: str | None = None) -> Iterator[Life]:
        """One request, of that client if there is one; its samples are numbered from ``first`` on.

        It may go on with a conversation that has ``ended``, and may have been cut off before.
        """
        random, pages = self._random, self._drawn.pages.num_total
        capacity = self._drawn.groups.tokens_in(pages, pages * self._drawn.page_size)
        longest = min(LONGEST_PROMPT, capacity - 1)
        prompt = self._next_turn(ended, longest) if ended and random.random() > 0.6 else random_prompt(random, longest)
        room = capacity - len(prompt)
        max_tokens = room if random.random() > 0.7 else random.randint(1, min(LONGEST_OUTPUT, room))
        params = msgspec.structs.replace(
            PARAMS,
            priority=random.choice((0, 0, 0, 5, -20)) if client is None else 0,
            num_speculative_tokens=random.choice((None, None, 0, 1, 2)),
            prompt_logprobs=random.choice((None, None, None, 0)),
        )
        client, user = client or random.choice(list(WEIGHTS)), random.choice(USERS)
        salt = random.choice((b"", b"", b"private", None))
        adapter_id = random.choice((0, *self._adapters.loaded))
        if salt is not None and adapter_id:
            salt += b"%d" % adapter_id
        for number in range(first, first + random.choice((1, 1, 2, 3))):
            constrained = random.random() > 0.8
            length = random.choice((None, 1, LONGEST_OUTPUT // 2)) if constrained else None
            constraint = LateConstraint(length) if constrained else None
            sequence = Sequence(
                str(number), prompt, params, frozenset({EOS}), max_tokens, 0, client=client, salt=salt,
                constraint=constraint, adapter_id=adapter_id, user=user,
            )  # fmt: skip
            life = life_of(sequence, length)
            if random.random() > 0.8:
                self._take_up(life)
            if constraint is not None and not sequence.awaits_mask:
                constraint.answer(random, life.output, self._drawn.drafts.most)
            yield life

    def _next_turn(self, ended: ListOf[Life], longest: int) -> list[int]:
        """What was said before in a conversation that has ended, and a token more."""
        life = self._random.choice(ended)
        said = life.sequence.prompt_token_ids + life.received
        return [*said[: longest - 1], self._random.randrange(1, VOCABULARY)]

    def _take_up(self, life: Life) -> None:
        """It was cut off behind its first tokens, and goes on; its constraint is told of them now."""
        sequence = life.sequence
        life.received = life.expected[: self._random.randint(0, len(life.expected) - 1)]
        sequence.output_token_ids = list(life.received)
        for token_id in life.received if sequence.constraint is not None else ():
            sequence.constraint.advance(token_id)
            sequence.awaits_mask = True
