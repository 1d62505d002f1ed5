"""How long chips take to exchange what a step has them exchange, at best: over the links between neighbours (ICI)."""

from caching.tpu.tpu_chip import Chip
from engine.planner.hlo_traffic import Collective

HOP_SECONDS = 1e-6
"""From one chip to the next, however little is sent ("How to Scale Your Model", jax-ml.github.io/scaling-book)."""

ROUNDS = {"all-reduce": 2}
"""A sum is a reduce-scatter and an all-gather; the others go once round."""


def exchange_seconds(collective: Collective, chip: Chip, chips: int) -> float:
    """One collective of so many chips, in a ring that runs both ways round.

    Every slice has such a ring. Where there are wires for more than one, large exchanges may be quicker; a step's are small,
    and what they take is mostly the way.
    """
    if collective.kind == "collective-permute":
        return HOP_SECONDS + collective.nbytes / chip.link_bandwidth
    rounds = ROUNDS.get(collective.kind, 1)
    sent = collective.nbytes * (chips - 1) / chips
    return rounds * (sent / (2 * chip.link_bandwidth) + HOP_SECONDS * (chips // 2))


def exchanges_seconds(collectives: list[Collective], chip: Chip, chips: int) -> float:
    """All of a program's, one after the other: that they wait for each other in a layer is their nature."""
    return sum(one.times * exchange_seconds(one, chip, chips) for one in collectives)
